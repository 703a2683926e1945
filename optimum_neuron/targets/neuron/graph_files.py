# SPDX-License-Identifier: Apache-2.0
"""A lowered graph in an artifact's folder: its HLO in one file, what its parameters and results are in another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from ...artifact.artifact import ArtifactError
from ...artifact.schema import read_object
from .graph_io import GraphIO


if TYPE_CHECKING:
    from .lowering.lower import LoweredGraph

HLO_SUFFIX, IO_SUFFIX = ".hlo", ".json"


def write_graph(graph: LoweredGraph, folder: Path) -> None:
    (folder / (graph.name + HLO_SUFFIX)).write_bytes(graph.hlo)
    text = json.dumps(graph.io.to_dict(), indent=1) + "\n"
    (folder / (graph.name + IO_SUFFIX)).write_text(text, encoding="utf-8")


def read_hlo(path: Path) -> bytes:
    """Return the bytes of a graph's HLO module, or raise ArtifactError where the file holds none."""
    from .lowering import hlo

    data = path.read_bytes()
    try:
        hlo.parse(data)
    except ValueError as error:
        raise ArtifactError(f"{path} holds no graph: {error}; export the model again") from error
    return data


def read_graph_io(path: Path) -> GraphIO:
    """Return the parameters and results of the graph in an HLO file, or raise ArtifactError where none are described."""
    described = path.with_suffix(IO_SUFFIX)
    try:
        return GraphIO.from_dict(read_object(described))
    except ValueError as error:
        raise ArtifactError(f"{described} describes no graph: {error}; export the model again") from error
