# SPDX-License-Identifier: Apache-2.0
"""Numbers of a graph's operators by kind: steps of a cpu plan, or HLO instructions; and the cost of HLO."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...artifact.artifact import GRAPHS_FOLDER, Artifact, ArtifactError
from ...artifact.schema import read_object
from ...config import HLO_TARGETS
from ...hub.facts import Linted


@dataclass(frozen=True)
class CountedGraphs:
    """Counts of an artifact's graphs, by name.

    Attributes:
        arena: bytes of scratch memory that a plan needs.
    """

    operators: dict[str, dict[str, int]]
    costs: dict[str, dict[str, float]]
    arena: int
    lint: Linted


def count_operators(artifact: Artifact) -> CountedGraphs:
    """Read every graph once, after its digest was compared; raise ArtifactError where a file is malformed."""
    if artifact.target in HLO_TARGETS:
        return _count_hlo(artifact)
    operators: dict[str, dict[str, int]] = {}
    arena = 0
    for graph in artifact.graphs:
        name = f"{GRAPHS_FOLDER}/{graph.name}.json"
        if name in artifact.manifest["files"]:
            plan = _read_plan(artifact.path / name)
            operators[graph.name] = dict(Counter(map(_step_kind, plan["steps"])).most_common())
            size = plan.get("arena")
            arena = max(arena, size if isinstance(size, int) else 0)
    missing = f"the rules are of HLO, which {artifact.target} has none of"
    return CountedGraphs(operators, {}, arena, Linted(missing=missing))


def _read_plan(path: Path) -> dict[str, Any]:
    try:
        plan = read_object(path).get("plan")
    except ValueError as error:
        raise ArtifactError(f"{path} cannot be read: {error}; export the model again") from error
    if not isinstance(plan, dict) or not isinstance(plan.get("steps"), list):
        raise ArtifactError(f"{path} holds no plan; export the model again")
    return plan


def _step_kind(step: object) -> str:
    found = step if isinstance(step, dict) else {}
    kind = found.get("operator") if found.get("kind") == "TorchCall" else found.get("kind")
    return kind if isinstance(kind, str) else "unknown"


def _count_hlo(artifact: Artifact) -> CountedGraphs:
    from ...targets.neuron.sdk.stacks import check_reading

    try:
        check_reading()
    except RuntimeError as error:
        return CountedGraphs({}, {}, 0, Linted(missing=str(error)))
    from ...targets.neuron.graphs import hlo
    from ...targets.neuron.lint.cost import graph_cost
    from ...targets.neuron.lint.lint import artifact_graphs, lint
    from ...targets.neuron.sdk.hardware import CHIPS

    operators: dict[str, dict[str, int]] = {}
    costs: dict[str, dict[str, float]] = {}
    findings: list[dict[str, str]] = []
    for name, data, io in artifact_graphs(artifact):
        module = hlo.parse(data)
        operators[name] = dict(Counter(each.opcode for _, each in hlo.instructions(module)).most_common())
        cost = graph_cost(name, data, io, artifact.target)
        costs[name] = {
            "read": cost.read,
            "read once": cost.needed,
            "written": cost.written,
            "flops": cost.total_flops,
            "collectives": sum(cost.collectives.values()),
            "collective bytes": cost.collective_bytes,
        }
        if artifact.target in CHIPS:
            costs[name]["seconds at least"] = cost.seconds(artifact.target)
        findings += [
            {"graph": each.graph, "severity": each.severity, "problem": each.problem, "remedy": each.remedy}
            for each in lint(name, data, io, artifact.target)
        ]
    return CountedGraphs(operators, costs, 0, Linted(tuple(findings)))
