# SPDX-License-Identifier: Apache-2.0
"""Small artifacts for the tests of the writer, and processes that end in the middle of writing one."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers import tiny_config
from torch import Tensor

from optimum_neuron.artifact.artifact import MANIFEST_NAME, WEIGHTS_NAME, Artifact
from optimum_neuron.artifact.weights import write_weights
from optimum_neuron.artifact.writer import ArtifactWriter, write_artifact
from optimum_neuron.step.attention.state import KeyValueState
from optimum_neuron.step.model_spec import ModelSpec
from optimum_neuron.step.spec import graph_specs


CONFIG = tiny_config()
MANIFEST = {
    "config": CONFIG.to_dict(),
    "model": ModelSpec(300, (KeyValueState(0, 2, 16, 16),), num_embeddings=300).to_dict(),
    "target": "eager",
    "target_data": {},
    "task": "text-generation",
    "tied_weights": {},
    "versions": {},
    "graphs": {graph.name: {} for graph in graph_specs(CONFIG)},
}
# What Python reports before it does it: a process that ends at each of them in turn ends between all steps of a writer.
STEPS = ("ctypes.dlopen", "fcntl.flock", "os.chmod", "os.mkdir", "os.remove", "os.rename", "os.rmdir")


def fill(writing: ArtifactWriter, text: str) -> None:
    (writing.path / "config.json").write_text(text, encoding="utf-8")
    (writing.path / WEIGHTS_NAME).write_text(text * 100, encoding="utf-8")


def write(output: Path, text: str, *, overwrite: bool = False) -> None:
    with write_artifact(output, overwrite=overwrite) as writing:
        fill(writing, text)
        writing.commit(MANIFEST)


def read(output: Path) -> str:
    """What the whole artifact at `output` was written with."""
    artifact = Artifact.open(output)
    artifact.verify()
    text = (output / "config.json").read_text(encoding="utf-8")
    assert artifact.file(WEIGHTS_NAME).read_text(encoding="utf-8") == text * 100
    return text


def write_tensors(folder: Path, tensors: dict[str, Tensor]) -> Artifact:
    """As much of an artifact as weights need."""
    (folder / WEIGHTS_NAME).parent.mkdir(parents=True)
    return as_artifact(folder, write_weights(tensors, folder))


def as_artifact(folder: Path, tied: dict[str, str] | None = None) -> Artifact:
    data = (folder / WEIGHTS_NAME).read_bytes()
    entry = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    return Artifact(folder, {"files": {WEIGHTS_NAME: entry}, "tied_weights": tied or {}})


def edit_manifest(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((path / MANIFEST_NAME).read_text(encoding="utf-8"))
    change(manifest)
    (path / MANIFEST_NAME).write_text(json.dumps(manifest), encoding="utf-8")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fork(action: Callable[[], object], kill_at: int = 0) -> int:
    """Runs a function in a forked process, which kills itself at one of STEPS; returns the process's number."""
    pid = os.fork()
    if pid == 0:
        steps = iter(range(1, sys.maxsize))

        def count(event: str, arguments: object) -> None:
            if event in STEPS and next(steps) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(count)
            action()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid


def in_child(action: Callable[[], object], kill_at: int = 0) -> int:
    """As `fork`; returns the status of the ended process as waitpid has it."""
    return os.waitpid(fork(action, kill_at), 0)[1]
