# SPDX-License-Identifier: Apache-2.0
"""The facts of an artifact for its page: those of its files, and what its graphs compute and take of memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ...artifact.artifact import MANIFEST_NAME, Artifact, is_graph_file, is_weight_file
from ...hub.collect import graph_bytes, graph_facts, read_facts
from ...hub.facts import ArtifactFacts, GraphFacts
from ...hub.measurements import Measurements
from .memory import collect_memory
from .operators import CountedGraphs, count_operators


HELPER = "helper"


def collect_facts(artifact: Artifact, measured: Measurements | None = None) -> ArtifactFacts:
    """Return all facts of an artifact, also those that are counted in its graphs.

    Args:
        measured: speeds in place of those that are recorded in its folder.

    Raises:
        ArtifactError: a file was changed after the export, or is malformed, or measurements are of another artifact.
    """
    facts = read_facts(artifact, measured)
    counted = count_operators(artifact)
    memory, notes = collect_memory(artifact, counted.arena)
    return replace(facts, graphs=_collect_graphs(artifact, counted), memory=memory, lint=counted.lint, notes=notes)


def _collect_graphs(artifact: Artifact, counted: CountedGraphs) -> tuple[GraphFacts, ...]:
    """Return the steps, then the graphs that are none."""
    steps = [graph_facts(artifact, spec) for spec in artifact.graphs]
    others = sorted(counted.operators.keys() - {each.name for each in steps})
    helpers = [GraphFacts(name, HELPER, 0, 0, 0, 0, graph_bytes(artifact, name), None) for name in others]
    return tuple(
        replace(each, operators=counted.operators.get(each.name, {}), cost=counted.costs.get(each.name, {}))
        for each in (*steps, *helpers)
    )


def check_output(artifact: Artifact, path: Path) -> None:
    """Refuse to write a file that is the artifact's own, or would be taken for one.

    Raises:
        ValueError: it is.
        IsADirectoryError: it is a folder.
    """
    folder, real = artifact.path.resolve(), path.expanduser().resolve()
    if real.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file")
    if not real.is_relative_to(folder):
        return
    name = real.relative_to(folder).as_posix()
    if name in artifact.manifest["files"] or name == MANIFEST_NAME or is_graph_file(name) or is_weight_file(name):
        raise ValueError(f"{path} is, or would be, a file of the artifact itself; name another file")
