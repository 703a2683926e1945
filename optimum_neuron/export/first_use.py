# SPDX-License-Identifier: Apache-2.0
"""Artifacts by name: one that exists, or one that a named checkpoint becomes, which is exported into the user's cache once; and the
command that exports an artifact again, from its manifest.

Nothing here imports torch before a checkpoint has to be read: a wrong name is refused at once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shlex
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from .. import progress
from ..artifact.artifact import MANIFEST_NAME, Artifact, ArtifactError
from ..artifact.find import find_artifact
from ..artifact.partial import locked_folder
from ..artifact.user_cache import cache_folder
from ..checkpoints.origin import read_origin
from ..config import ExportOptions, NeuronConfig
from ..targets import resolve_target
from ..version import __version__


if TYPE_CHECKING:
    from ..checkpoints.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

CACHE_KIND = "exports"
# Sizes of an export without any in its options: some requests at a time, each with an answer of usual length.
DEFAULT_ROWS, LONGEST_DEFAULT = 4, 4096
_LONGEST_STEM = 60
_OPTION = re.compile(r"(?<!\S)--[a-z][a-z-]*")
# The options of a command that runs a named model.
_OWN_OPTIONS = {"--batch-size", "--sequence-length", "--revision", "--token", "--trust-remote-code"}
_EXPORT = ("optimum-cli", "export", "neuron")
_UNKNOWN = "MODEL"
_REMEDY = "name an artifact, a checkpoint folder, a .gguf file, or a Hub id as in org/name"


@dataclass(frozen=True)
class Opened:
    """An artifact, and whether its compiled code may run as it is."""

    artifact: Artifact
    trust_native_code: bool


def open_or_export(model: str, reading: ExportOptions, sizes: Mapping[str, int]) -> Opened:
    """Open the artifact of a name, or the one that the checkpoint of that name becomes on first use, of the `sizes` that were asked for.

    Raise FileNotFoundError where nothing has that name, ValueError where it cannot be exported or has other sizes, ArtifactError for a corrupt one.
    """
    _check_name(model)
    found = open_artifact(model, reading, sizes)
    if found is not None:
        return found
    return export_once(model, reading, lambda checkpoint: _default_config(checkpoint, sizes))


def open_named(args: Namespace) -> Artifact:
    """Open the artifact that a command's words name, as `open_or_export`."""
    given = {name: getattr(args, name) for name in ("batch_size", "sequence_length")}
    sizes = {name: size for name, size in given.items() if size is not None}
    reading = ExportOptions(revision=args.revision, token=args.token, trust_remote_code=args.trust_remote_code)
    return open_or_export(args.model, reading, sizes).artifact


def open_artifact(model: str, reading: ExportOptions, options: Mapping[str, Any]) -> Opened | None:
    """Open the artifact of a name; return None where it names a checkpoint.

    Raises TypeError or ValueError for `options`, fields of NeuronConfig, that are wrong or differ from the artifact's; ArtifactError for a
    corrupt one.
    """
    found = find_artifact(model, export=None, native_code=reading.trust_remote_code, **reading.hub)
    if found is None:
        return None
    artifact, from_hub = found
    if options:
        from ..runtime.arguments import refuse_other_options

        refuse_other_options(artifact, NeuronConfig.from_dict(options), options)
    return Opened(artifact, reading.trust_remote_code or not from_hub)


def export_once(
    model: str,
    reading: ExportOptions,
    choose_config: Callable[[Checkpoint], NeuronConfig],
    notify: Callable[[str], None] = logger.warning,
) -> Opened:
    """Export a checkpoint into the cache, or find it there. Processes that ask for the same one wait for each other.

    `notify` gets one line before an export, and one before a wait. Raises ValueError where the checkpoint cannot be exported,
    FileNotFoundError where there is none, and PermissionError where the cache is not to be trusted.
    """
    with progress.importing():
        from ..checkpoints.find import find_checkpoint
        from .recipe import export_model

    checkpoint = find_checkpoint(model, trust_remote_code=reading.trust_remote_code, **reading.hub)
    config = choose_config(checkpoint)
    config = replace(config, target=resolve_target(config.target))
    output = cache_folder(CACHE_KIND) / _cache_name(checkpoint, config)
    with ExitStack() as held:
        lock = output.with_name(f".{output.name}.awaited")
        try:
            held.enter_context(locked_folder(lock))
        except BlockingIOError:
            notify(f"{model} is exported by another process; waiting for it")
            held.enter_context(locked_folder(lock, wait=True))
        if output.is_symlink():
            raise PermissionError(f"{output} is a link, which may lead out of the cache; remove it")
        try:
            return Opened(Artifact.open(output), True)
        except (FileNotFoundError, ArtifactError):
            pass  # not there yet, or damaged: export_model replaces what is no whole artifact
        # Exports the same artifact to the folder OUT.
        command = shlex.join([*_EXPORT, "OUT", "--model", model, *reading_words(reading), *option_words(config)])
        notify(
            f"{model} is a checkpoint: exporting it once, for {config.batch_size} requests of up to "
            f"{config.sequence_length:,} tokens, to {output}; for other options: {command}"
        )
        named = checkpoint.folder / (checkpoint.gguf_file or "")
        try:
            export_model(named, output, config=config, trust_remote_code=checkpoint.trust_remote_code, overwrite=True)
        except ValueError as error:
            if not set(_OPTION.findall(str(error))) - _OWN_OPTIONS:
                raise
            raise ValueError(f"{error}; the command that takes such options: {command}") from error
        return Opened(Artifact.open(output), True)


def _check_name(model: str) -> None:
    """Raise FileNotFoundError for a name of no file or folder of a right kind, and of no possible Hub id."""
    path, problem = Path(model).expanduser(), None
    if not model:
        problem = "the name of the model is empty"
    elif path.is_dir():
        if not any(any(path.glob(kind)) for kind in (MANIFEST_NAME, "config.json", "adapter_config.json", "*.gguf")):
            problem = f"{path} holds neither {MANIFEST_NAME} (an artifact) nor config.json (a checkpoint)"
    elif path.exists() and path.suffix != ".gguf":
        problem = f"{path} is a file of another kind"
    elif not path.exists() and (not _is_hub_name(model) or (path.suffix == ".gguf" and ":" not in model)):
        problem = f"{model} does not exist"
    if problem is not None:
        raise FileNotFoundError(f"{problem}; {_REMEDY}")


def _is_hub_name(model: str) -> bool:
    # The Hub's client takes longer to import than an artifact to open.
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    from ..checkpoints.hub import hub_file

    try:
        validate_repo_id(model)
    except HFValidationError:
        return hub_file(model) is not None
    return True


def _default_config(checkpoint: Checkpoint, sizes: Mapping[str, int]) -> NeuronConfig:
    """Return the default options of an export. Graphs return logits, so that a request may ask for any sampling."""
    longest = checkpoint.longest_text(checkpoint.load_config())
    options: dict[str, Any] = {
        "batch_size": DEFAULT_ROWS,
        "sequence_length": LONGEST_DEFAULT if longest is None else min(longest, LONGEST_DEFAULT),
        "output_logits": True,
    }
    if checkpoint.gguf_file is not None:
        options["dtype"] = "bfloat16"  # such a file names no type of activations, and transformers would take float32
    return NeuronConfig.from_dict(options | dict(sizes))


def _cache_name(checkpoint: Checkpoint, config: NeuronConfig) -> str:
    """Return a name for a checkpoint's present content, exported with a config by this version."""
    origin, identity = read_origin(checkpoint.folder), checkpoint.identity()
    if "revision" in origin:
        content: Any = [origin["repo"], origin["revision"], checkpoint.gguf_file]
    else:  # size and time of each file: a device's number changes where a disk is mounted again
        content = {name: numbers[2:4] for name, numbers in identity["files"].items()}
    facts = json.dumps([content, identity["trust_remote_code"], config.to_dict(), __version__])
    called = checkpoint.gguf_file or origin.get("repo") or str(checkpoint.folder.resolve())
    return f"{Path(called).name[:_LONGEST_STEM]}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}"


def export_command(manifest: Mapping[str, Any], config: NeuronConfig, output: str) -> str:
    """Return a line for a shell that exports an artifact to the folder `output`.

    It leaves out options that follow from the others, and folders of a checkpoint. The beginning of its sha256 names a calibration text.
    """
    origin = manifest.get("origin", {})
    options = ExportOptions(
        revision=origin.get("revision"),
        adapter=adapter_names(manifest) or None,
        dequantize=origin.get("dequantize", False),
        quantization_calibration=f"{origin['calibration'][:12]}.txt" if "calibration" in origin else None,
        trust_remote_code=any(name.endswith(".py") for name in manifest["files"]),
    )
    model = origin.get("repo") or printable_name(manifest.get("source", ""))
    folder = output if output.isprintable() and not output.startswith("-") else "artifact/"
    return shlex.join([*_EXPORT, "--model", model, *reading_words(options), *option_words(config), folder])


def reading_words(options: ExportOptions) -> list[str]:
    """Return the words of a command line that give these options; it never names a token."""
    declared = ExportOptions.declared()
    names = ("revision", "adapter", "dequantize", "quantization_calibration", "trust_remote_code")
    given = {name: getattr(options, name) for name in names}
    return [word for name, value in given.items() if value for word in declared[name].command_words(value)]


def option_words(config: NeuronConfig) -> list[str]:
    declared, needed = NeuronConfig.declared(), needed_options(config).items()
    return [word for name, value in needed if value is not None for word in declared[name].command_words(value)]


def adapter_names(manifest: Mapping[str, Any]) -> list[str]:
    sources = (each.get("source") for each in manifest.get("adapters", []))
    return [printable_name(source) for source in sources if isinstance(source, str)]


def printable_name(source: str) -> str:
    """Return a Hub id as it is, the last part of a path, and a placeholder for a name that does not print or looks like an option."""
    is_path = source.startswith(("/", "~", ".")) or source.count("/") > 1 or "\\" in source
    name = PurePath(source.replace("\\", "/")).name if is_path else source.rstrip("/")
    return name if name and name.isprintable() and not name.startswith("-") else _UNKNOWN


def needed_options(config: NeuronConfig) -> dict[str, Any]:
    """Return the options of a config that do not follow from the others."""
    if config.quantization is None or config.target != "cpu":
        config = replace(config, activations=config.activations or "auto")
    options = config.to_dict() | {"activations": config.activations or "none"}
    for name in config.option_names():
        fewer = {other: value for other, value in options.items() if other != name}
        try:
            follows = NeuronConfig.from_dict(fewer) == config
        except ValueError:  # options that contradict the default of another one
            follows = False
        if follows and name not in ("target", "dtype", "batch_size", "sequence_length"):
            options = fewer
    return options
