# SPDX-License-Identifier: Apache-2.0
"""Rules about what a graph shares with the outside: states, its description, other ranks, device memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ..graphs import hlo
from ..graphs.io import CACHE, SNAPSHOTS
from ..sdk.hardware import CHIPS, GIB
from .graph import LintGraph, Place


def aliases(graph: LintGraph) -> Iterator[Place]:
    """nkipy, core/backend/hlo.py: a parameter is aliased once, an output that is an input needs a copy; EVRF064 of the SDK."""
    parameters = hlo.parameters(graph.module)
    root = graph.by_id[hlo.entry(graph.module).root_id]
    entries = list(graph.module.input_output_alias.entries)
    remedy = "update each state exactly once in a step"
    for number, count in Counter(entry.parameter_number for entry in entries).items():
        if count > 1:
            yield parameters[number], f"{count} outputs share the memory of this input", remedy, "error"
    aliased = {}
    for entry in entries:
        output = graph.by_id[root.operand_ids[entry.output_shape_index[0]]]
        parameter = parameters[entry.parameter_number]
        aliased[parameter.name] = output
        if list(output.shape.dimensions) != list(parameter.shape.dimensions) or hlo.dtype_name(
            output.shape
        ) != hlo.dtype_name(parameter.shape):
            yield parameter, "its new value has another shape or type", "keep the state's shape and type", "error"
        if entry.kind != hlo.MUST_ALIAS:
            yield parameter, "its new value need not share its memory", "alias it as MUST_ALIAS", "error"
    for operand in root.operand_ids:
        if graph.by_id[operand].opcode == "parameter":
            problem = "an output that is an input needs a copy"
            yield graph.by_id[operand], problem, "leave it out, or update it", "error"
    updated = {each.alias_of for each in graph.io.outputs}
    for binding in graph.io.inputs:
        # A sampler reads what a step left for it, a copy a state or snapshots of it, and it updates the other.
        needed = binding.name.startswith((CACHE, SNAPSHOTS)) and _copied_state(binding.name) not in aliased
        needed = needed or binding.name in updated
        if binding.role == "state" and needed and binding.name not in aliased:
            yield None, f"state {binding.name} is not updated in place", remedy, "error"


def _copied_state(state: str) -> str:
    """Return the name of the snapshots of a state, or of the state that snapshots copy."""
    return state.removeprefix(SNAPSHOTS) if state.startswith(SNAPSHOTS) else SNAPSHOTS + state


def bindings(graph: LintGraph) -> Iterator[Place]:
    """Error code EVRF064 of the SDK; nrt_status.rst, 2: a tensor of another name or size than the NEFF's."""
    found = [
        (each.name, tuple(each.shape.dimensions), hlo.dtype_name(each.shape)) for each in hlo.parameters(graph.module)
    ]
    recorded = [(each.name, each.shape, each.dtype) for each in graph.io.inputs]
    for number, (left, right) in enumerate(zip(found, recorded, strict=False)):
        if left != right:
            yield (
                None,
                f"parameter {number} is {left}, its description says {right}",
                "export the model again",
                "error",
            )
    root = graph.by_id[hlo.entry(graph.module).root_id]
    for binding, shape in zip(graph.io.outputs, root.shape.tuple_shapes, strict=False):
        if (tuple(shape.dimensions), hlo.dtype_name(shape)) != (binding.shape, binding.dtype):
            problem = f"result {binding.name} is {hlo.dtype_name(shape)}{list(shape.dimensions)}, not {binding.dtype}{list(binding.shape)}"
            yield None, problem, "report it: this is a fault of the lowering", "error"
    if len(found) != len(recorded):
        problem = f"the graph has {len(found)} parameters, its description {len(recorded)}"
        yield None, problem, "export the model again", "error"


def collectives(graph: LintGraph) -> Iterator[Place]:
    """longdct/vllm-neuron: a rank as a trace constant makes a program per rank; all ranks of ours are one group."""
    everyone = [list(range(graph.io.world_size))]
    for each in graph.of("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"):
        groups = [list(group.replica_ids) for group in each.replica_groups]
        if groups != everyone:
            problem = f"replica groups {groups}, for {graph.io.world_size} ranks"
            yield each, problem, "let all ranks take part in one group", "error"
    for each in graph.of("partition-id", "replica-id"):
        yield each, "a rank as part of the program", "pass the rank as a weight", "error"


def memory(graph: LintGraph) -> Iterator[Place]:
    """Error codes EVRF009, EOOM001 and EOOM002 of the SDK: inputs and outputs above what a logical core has."""
    chip = CHIPS.get(graph.target)
    aliased = {entry.output_shape_index[0] for entry in graph.module.input_output_alias.entries}
    results = [shape for index, shape in enumerate(hlo.results(graph.module)) if index not in aliased]
    needed = sum(map(hlo.byte_count, [*(each.shape for each in hlo.parameters(graph.module)), *results]))
    if chip is not None and needed > chip.core_hbm:
        problem = (
            f"{needed / GIB:.1f} GiB of weights, KV cache and results for a core of {chip.core_hbm / GIB:.0f} GiB"
        )
        yield None, problem, "raise --tensor-parallel-size; optimum-cli neuron estimate shows what fits", "error"
