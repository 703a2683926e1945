# SPDX-License-Identifier: Apache-2.0
"""Graphs of an artifact, compiled again where its own cannot be used on this machine or are not trusted."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..artifact.artifact import Artifact, is_graph_file, is_weight_file
from . import CompileJob


@contextmanager
def compiled_again(
    artifact: Artifact, compile_graphs: Callable[[CompileJob], dict[str, Any]], *, trust_remote_code: bool
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield a folder with newly compiled graphs in its `graphs/` until the context ends, and their `target_data`.

    Raises:
        ArtifactError: what they are compiled from was changed.
        RuntimeError: a graph cannot be compiled here.
    """
    artifact.verify(name for name in artifact.manifest["files"] if not is_graph_file(name))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name in ("graphs", "weights"):
            (folder / name).mkdir()
        for name in artifact.manifest["files"]:
            if is_weight_file(name):
                (folder / name).symlink_to(artifact.file(name).absolute())
            elif "/" not in name:
                shutil.copyfile(artifact.file(name), folder / name)
        described = artifact.config, artifact.model, artifact.graphs, artifact.tied_weights
        yield folder, compile_graphs(CompileJob(folder, *described, trust_remote_code))
