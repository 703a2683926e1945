# SPDX-License-Identifier: Apache-2.0
"""Artifacts by name: one that exists, or one that a named checkpoint becomes, which is exported into the user's cache once.

Nothing here imports torch before a checkpoint has to be read: a wrong name is refused at once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shlex
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from ..artifact.artifact import MANIFEST_NAME, Artifact, ArtifactError
from ..artifact.find import find_artifact
from ..artifact.partial import locked_folder
from ..artifact.user_cache import cache_folder
from ..checkpoints.hub import hub_file
from ..checkpoints.origin import read_origin
from ..command_options import hub_options
from ..config import ExportOptions, NeuronConfig
from ..version import __version__
from .export_command import option_words, reading_words


if TYPE_CHECKING:
    from ..checkpoints.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

CACHE_KIND = "exports"
# Sizes of an export without any in its options: some requests at a time, each with an answer of usual length.
DEFAULT_ROWS, LONGEST_DEFAULT = 4, 4096
_LONGEST_STEM = 60
_OPTION = re.compile(r"(?<!\S)--[a-z][a-z-]*")
# The options of `command_options.add_named_model`.
_OWN_OPTIONS = {"--batch-size", "--sequence-length", "--revision", "--token", "--trust-remote-code"}
_REMEDY = "name an artifact, a checkpoint folder, a .gguf file, or a Hub id as in org/name"


@dataclass(frozen=True)
class Opened:
    """An artifact, and whether its compiled code may run as it is."""

    artifact: Artifact
    trust_native_code: bool


def open_or_export(model: str, reading: ExportOptions, sizes: Mapping[str, int]) -> Opened:
    """Open the artifact of a name, or the one that the checkpoint of that name becomes on first use.

    Args:
        sizes: the `batch_size` and `sequence_length` that were asked for; an artifact has to have the same.

    Raises:
        FileNotFoundError: nothing of that name exists, here or on the Hub.
        ValueError: the checkpoint cannot be exported, or an artifact has other sizes.
        ArtifactError: the artifact is corrupt.
    """
    _check_name(model)
    found = open_artifact(model, reading, sizes)
    if found is not None:
        return found
    return export_once(model, reading, lambda checkpoint: _default_config(checkpoint, sizes))


def open_named(args: Namespace) -> Artifact:
    """Open the artifact that a command's words name, as `open_or_export`."""
    sizes = {name: getattr(args, name) for name in ("batch_size", "sequence_length")}
    reading = ExportOptions(**hub_options(args))
    return open_or_export(
        args.model, reading, {name: size for name, size in sizes.items() if size is not None}
    ).artifact


def open_artifact(model: str, reading: ExportOptions, options: Mapping[str, Any]) -> Opened | None:
    """Open the artifact of a name; return None where it names a checkpoint.

    Raises:
        TypeError, ValueError: `options`, fields of NeuronConfig, are wrong or differ from the artifact's.
        ArtifactError: the artifact is corrupt.
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

    Args:
        notify: gets one line before an export, and one before a wait.

    Raises:
        ValueError: the checkpoint cannot be exported.
        FileNotFoundError: there is none.
        PermissionError: the cache is not to be trusted.
    """
    from ..checkpoints.find import find_checkpoint
    from ..targets import resolve_target
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
        notify(
            f"{model} is a checkpoint: exporting it once, for {config.batch_size} requests of up to "
            f"{config.sequence_length:,} tokens, to {output}; for other options: {_export_command(model, reading, config)}"
        )
        named = checkpoint.folder / (checkpoint.gguf_file or "")
        with _with_command(_export_command(model, reading, config)):
            export_model(named, output, config=config, trust_remote_code=checkpoint.trust_remote_code, overwrite=True)
        return Opened(Artifact.open(output), True)


@contextmanager
def _with_command(command: str) -> Iterator[None]:
    """Add a command to an error that names options of an export: the one that takes them."""
    try:
        yield
    except ValueError as error:
        if not set(_OPTION.findall(str(error))) - _OWN_OPTIONS:
            raise
        raise ValueError(f"{error}; the command that takes such options: {command}") from error


def _export_command(model: str, reading: ExportOptions, config: NeuronConfig) -> str:
    """Return the command that exports the same artifact to the folder OUT, as a line for a shell."""
    words = ["optimum-cli", "export", "neuron", "OUT", "--model", model]
    return shlex.join([*words, *reading_words(reading), *option_words(config)])


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
