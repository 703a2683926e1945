# SPDX-License-Identifier: Apache-2.0
"""The artifact that an engine serves: the one it names, or one exported from the checkpoint that it names."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..artifacts.artifact import Artifact, ArtifactError
from ..artifacts.find import find_artifact
from ..artifacts.partial import locked_folder
from ..artifacts.user_cache import cache_folder
from ..checkpoints.find import find_checkpoint
from ..config import NeuronConfig
from ..export import export_model
from ..runtime.limits import refuse_other_options
from ..targets import resolve_target
from ..version import __version__


logger = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what is below its own name

DEFAULT_SLOTS = 8


@dataclass(frozen=True)
class ModelSource:
    """What an engine was asked to serve, as vLLM's options have it."""

    model: str
    revision: str | None
    token: str | bool | None
    trust_remote_code: bool


@dataclass(frozen=True)
class Served:
    """An artifact, and whether its compiled code may run as it is."""

    artifact: Artifact
    trust_native_code: bool


def open_served(source: ModelSource, options: dict[str, Any]) -> Served | None:
    """The artifact that `source` names; None where it names a checkpoint.

    Raises:
        TypeError, ValueError: `options`, fields of NeuronConfig, are wrong or differ from the artifact's.
        ArtifactError: the artifact is corrupt.
    """
    found = find_artifact(
        source.model,
        export=None,
        native_code=source.trust_remote_code,
        revision=source.revision,
        token=source.token,
    )
    if found is None:
        return None
    artifact, from_hub = found
    refuse_other_options(artifact, NeuronConfig.from_dict(options), options)
    return Served(artifact, source.trust_remote_code or not from_hub)


def export_served(source: ModelSource, config: NeuronConfig) -> Served:
    """Exports a checkpoint into the cache, or finds it there. Processes that ask for the same one wait for each other.

    Raises:
        ValueError: the checkpoint cannot be exported.
        FileNotFoundError: there is none.
        PermissionError: the cache is not to be trusted.
    """
    checkpoint = find_checkpoint(
        source.model, revision=source.revision, token=source.token, trust_remote_code=source.trust_remote_code
    )
    config = dataclasses.replace(config, target=resolve_target(config.target))
    output = cache_folder("vllm") / _identity(checkpoint.folder, config)
    with locked_folder(output.with_name(f".{output.name}.awaited"), wait=True):
        try:
            return Served(Artifact.open(output), True)
        except (FileNotFoundError, ArtifactError):
            pass  # not there yet, or damaged: export_model replaces what is no whole artifact
        logger.warning(
            "%s is a checkpoint: exporting it to %s, once for these sizes. To compile ahead of time, run\n"
            "  %s\nand serve OUT",
            source.model,
            output,
            shlex.join(export_command(source, config)),
        )
        export_model(
            checkpoint.folder, output, config=config, trust_remote_code=source.trust_remote_code, overwrite=True
        )
        return Served(Artifact.open(output), True)


def export_command(source: ModelSource, config: NeuronConfig) -> list[str]:
    """The command that exports the same artifact to OUT, with what differs from the defaults of the given sizes."""
    sizes = {name: getattr(config, name) for name in ("batch_size", "sequence_length")}
    default = NeuronConfig(**sizes, target=config.target).to_dict() | {"target": resolve_target("auto")}
    command = ["optimum-cli", "export", "neuron", "OUT", "--model", source.model]
    if source.revision is not None:
        command += ["--revision", source.revision]
    if source.trust_remote_code:
        command += ["--trust-remote-code"]
    for name, value in config.to_dict().items():
        flag = name.replace("_", "-")
        if name not in sizes and value == default[name]:
            continue
        if isinstance(value, bool):
            command += [f"--{flag}" if value else f"--no-{flag}"]
        else:
            command += [f"--{flag}", *(map(str, value) if isinstance(value, list) else [str(value)])]
    return command


def _identity(folder: Path, config: NeuronConfig) -> str:
    """A name for a checkpoint's present files, exported with a config by this version."""
    files = [
        (path.name, stat.st_size, stat.st_mtime_ns)
        for path in sorted(folder.iterdir())
        if path.is_file() and (stat := path.stat())
    ]
    facts = json.dumps([str(folder.resolve()), files, config.to_dict(), __version__])
    return f"{folder.name}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}"
