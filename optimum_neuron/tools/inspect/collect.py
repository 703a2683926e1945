# SPDX-License-Identifier: Apache-2.0
"""The facts of an artifact: tables for a terminal, which need no torch, and for its page also operators of graphs and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ...artifact.artifact import GRAPHS_FOLDER, MANIFEST_NAME, Artifact, ArtifactError, is_graph_file, is_weight_file
from ...artifact.schema import read_object
from ...cli import graph_table, make_table
from ...config import HLO_TARGETS, NEURON_TARGETS
from ...errors import first_line
from ...hub.collect import graph_bytes, graph_facts, read_facts, read_speeds
from ...hub.facts import ArtifactFacts, GraphFacts, Linted, MemoryParts, rounding_text
from ...step.spec import TensorSpec
from ...step.state_specs import BY_TOKEN, StateSizes, byte_count, kept_states
from ..certify import NOT_CERTIFIED, is_certified


HELPER = "helper"
# Uses of memory, in the order of their colors.
WEIGHTS, CACHE, STATE, COPIES, SCRATCH, RESERVE = PARTS = (
    "weights", "KV cache", "state of slots", "copies of state", "scratch", "reserve",
)  # fmt: skip


def collect_facts(artifact: Artifact) -> ArtifactFacts:
    """Return all facts of an artifact, also those of its graphs; raise ArtifactError where a file was changed or is malformed."""
    facts = read_facts(artifact)
    counted = _count_hlo(artifact) if artifact.target in HLO_TARGETS else _count_plans(artifact)
    memory, notes = collect_memory(artifact, counted.arena)
    graphs = [graph_facts(artifact, spec) for spec in artifact.graphs]
    for name in sorted(counted.operators.keys() - {each.name for each in graphs}):
        graphs.append(GraphFacts(name, HELPER, 0, 0, 0, 0, graph_bytes(artifact, name), None))
    whole = tuple(
        replace(each, operators=counted.operators.get(each.name, {}), cost=counted.costs.get(each.name, {}))
        for each in graphs
    )
    return replace(facts, graphs=whole, memory=memory, lint=counted.lint, notes=notes)


def check_output(artifact: Artifact, path: Path) -> None:
    """Raise ValueError where a file is the artifact's own or would be taken for one, and IsADirectoryError where it is a folder."""
    folder, real = artifact.path.resolve(), path.expanduser().resolve()
    if real.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file")
    if not real.is_relative_to(folder):
        return
    name = real.relative_to(folder).as_posix()
    if name in artifact.manifest["files"] or name == MANIFEST_NAME or is_graph_file(name) or is_weight_file(name):
        raise ValueError(f"{path} is, or would be, a file of the artifact itself; name another file")


@dataclass(frozen=True)
class _CountedGraphs:
    """Operators of an artifact's graphs by kind, and their cost, by name; and the scratch memory that a plan needs, in bytes."""

    operators: dict[str, dict[str, int]]
    costs: dict[str, dict[str, float]]
    arena: int
    lint: Linted


def _count_plans(artifact: Artifact) -> _CountedGraphs:
    operators: dict[str, dict[str, int]] = {}
    arena = 0
    for graph in artifact.graphs:
        name = f"{GRAPHS_FOLDER}/{graph.name}.json"
        if name not in artifact.manifest["files"]:
            continue
        path = artifact.path / name
        try:
            plan = read_object(path).get("plan")
        except ValueError as error:
            raise ArtifactError(f"{path} cannot be read: {error}; export the model again") from error
        if not isinstance(plan, dict) or not isinstance(plan.get("steps"), list):
            raise ArtifactError(f"{path} holds no plan; export the model again")
        once = plan.get("once")
        steps = (*(once if isinstance(once, list) else ()), *plan["steps"])
        kinds = (step.get("kind") if isinstance(step, dict) else None for step in steps)
        known = Counter(kind if isinstance(kind, str) else "unknown" for kind in kinds)
        operators[graph.name] = dict(known.most_common())
        size = plan.get("arena")
        arena = max(arena, size if isinstance(size, int) else 0)
    missing = f"the rules read HLO, and {artifact.target} has none"
    return _CountedGraphs(operators, {}, arena, Linted(missing=missing))


def _count_hlo(artifact: Artifact) -> _CountedGraphs:
    from ...targets.neuron.sdk.stacks import check_reading

    try:
        check_reading()
    except RuntimeError as error:
        return _CountedGraphs({}, {}, 0, Linted(missing=str(error)))
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
        shown = ("graph", "severity", "problem", "remedy")
        found = lint(name, data, io, artifact.target)
        findings += [{member: getattr(each, member) for member in shown} for each in found]
    return _CountedGraphs(operators, costs, 0, Linted(tuple(findings)))


def collect_memory(artifact: Artifact, arena: int) -> tuple[tuple[MemoryParts, ...], tuple[str, ...]]:
    """Return the memory of each core, or of the host, with plans of `arena` bytes; and sentences about missing parts."""
    files = sorted(artifact.manifest["files"].items())
    weights = [(name, entry["size"]) for name, entry in files if is_weight_file(name)]
    if artifact.target not in HLO_TARGETS:
        kept = _measure_parts(kept_states(artifact.config, artifact.model))
        parts = {WEIGHTS: sum(size for _, size in weights), **kept}
        return (MemoryParts("host", parts | ({SCRATCH: arena} if arena else {})),), ()
    kept = _measure_parts(_rank_states(artifact))
    scratch: dict[str, int] = {}
    capacity: int | None = None
    notes: tuple[str, ...] = ()
    if artifact.target in NEURON_TARGETS:
        from ..estimate.estimate import estimate_model

        try:
            report = estimate_model(
                str(artifact.path), {}, [artifact.target], tensor_parallel_size=artifact.config.tensor_parallel_size
            )
        except (ValueError, RuntimeError, OSError) as error:
            notes = (f"Scratch memory is not estimated: {first_line(error)}.",)
        else:
            (one,) = report.estimates
            scratch, capacity = {SCRATCH: one.memory.activations, RESERVE: one.memory.reserve}, one.hbm
    # By rank, which names of files have.
    weights.sort(key=lambda file: int("0" + "".join(filter(str.isdigit, file[0]))))
    return tuple(
        MemoryParts(f"core {rank}", {WEIGHTS: size, **kept, **scratch}, tuple(scratch), capacity)
        for rank, (_, size) in enumerate(weights)
    ), notes


def group_states(states: Iterable[TensorSpec]) -> dict[str, list[TensorSpec]]:
    """Return the states of each use that has any."""
    found: dict[str, list[TensorSpec]] = {CACHE: [], STATE: [], COPIES: []}
    for state in states:
        is_copy = state.name.startswith("snapshots.")
        found[COPIES if is_copy else CACHE if state.name.startswith(BY_TOKEN) else STATE].append(state)
    return {part: members for part, members in found.items() if byte_count(members)}


def _measure_parts(states: Iterable[TensorSpec]) -> dict[str, int]:
    return {part: byte_count(members) for part, members in group_states(states).items()}


def _rank_states(artifact: Artifact) -> Iterable[TensorSpec]:
    """Return the states that graphs update in place: all ranks run the same module, on states of the same shapes."""
    from ...targets.neuron.graphs.io import HLO_SUFFIX, read_graph_io

    found = {}
    for name in artifact.manifest["files"]:
        if is_graph_file(name) and name.endswith(HLO_SUFFIX):
            for each in read_graph_io(artifact.path / name).inputs:
                if each.role == "state":
                    found[each.name] = TensorSpec(each.name, each.shape, each.dtype)
    return found.values()


def print_artifact(artifact: Artifact, terminal: Console) -> None:
    """Print the tables; no weights are read."""
    speeds, _ = read_speeds(artifact)
    terminal.print(_facts_table(artifact))
    if artifact.config.activations is not None:
        terminal.print(rounding_text(artifact.config.activations), soft_wrap=True)
    terminal.print(graph_table(artifact, f"{len(artifact.graphs)} graphs for {artifact.target}"))
    if speeds:
        table = make_table("speeds", ("measured", "with"), ("value", "unit"))
        for each in speeds:
            table.add_row(each["name"], pairs_text(each["conditions"]), f"{each['value']:,.4g}", each["unit"])
        terminal.print(table)


def pairs_text(pairs: Mapping[str, Any]) -> str:
    """Return names with their values."""
    return ", ".join(f"{name} {value}" for name, value in pairs.items())


def _facts_table(artifact: Artifact) -> Table:
    facts = make_table(str(artifact.path), ("option", "value"))
    for name, value in artifact.config.to_dict().items():
        facts.add_row(name, ", ".join(map(str, value)) if isinstance(value, list) else str(value))
    facts.add_section()
    kept = StateSizes.measure(artifact.states())
    facts.add_row("cache per token", f"{kept.per_token:,} bytes")
    facts.add_row("state per slot", f"{kept.per_slot:,} bytes")
    for part, specs in group_states(kept_states(artifact.config, artifact.model)).items():
        facts.add_row(part, f"{byte_count(specs):,} bytes, {len(specs)} tensors")
    facts.add_section()
    if artifact.target in HLO_TARGETS:
        facts.add_row("certified", "yes" if is_certified(artifact) else NOT_CERTIFIED)
    for name, version in artifact.manifest["versions"].items():
        facts.add_row(f"exported with {name}", version)
    data = artifact.manifest["target_data"]
    if "lnc" in data:  # compiled for a device
        for name, version in data.get("versions", {}).items():
            facts.add_row(f"compiled with {name}", version)
        facts.add_row("logical NeuronCore", f"{data.get('lnc')} physical")
    return facts
