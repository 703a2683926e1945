# SPDX-License-Identifier: Apache-2.0
"""The rules of the lint, from the Neuron SDK's error-code pages and its runtime's status codes. Add a rule: add it to RULES."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from ....config import TOPK_LIMIT
from ..lowering import hlo
from ..sdk.hardware import CHIPS, GIB
from .graph import Graph, Place, Rule, Severity
from .operators import CONTROL_FLOW, CUSTOM_CALLS, FORBIDDEN, HOST, RANDOM, SUPPORTED, is_listed


CONSTANT_LIMIT = 1 << 20  # bytes; beyond, compile times grow: such tables belong with the weights
LARGEST_SORT = 16384
_INTEGERS = {"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"}
_SHAPE_ONLY = {"reshape", "broadcast", "convert", "copy", "transpose", "bitcast"}


def _opcodes(graph: Graph) -> Iterator[Place]:
    remedy = "express it in other operators"
    for each in graph.by_id.values():
        if each.opcode in FORBIDDEN:
            continue
        known = each.opcode in SUPPORTED
        if graph.operators is not None and not is_listed(each.opcode, graph.operators):
            # The list leaves out operators that the SDK's own graphs are full of.
            severity: Severity = "warning" if known else "error"
            yield each, f"the installed compiler does not list {each.opcode}", remedy, severity
        elif graph.operators is None and not known:
            yield each, f"{each.opcode} is not documented as supported", remedy, "warning"


def _control_flow(graph: Graph) -> Iterator[Place]:
    for each in graph.of(*CONTROL_FLOW):
        yield each, f"a {each.opcode} is control flow", "unroll it, or decide on the host", "error"


def _host_transfers(graph: Graph) -> Iterator[Place]:
    for each in graph.of(*HOST):
        yield each, f"a {each.opcode} talks to the host within a step", "pass it as an input or output", "error"


def _random(graph: Graph) -> Iterator[Place]:
    for each in graph.of(*RANDOM):
        yield each, "random numbers of the device ignore seeds", "pass uniform numbers as an input", "error"


def _reduce_windows(graph: Graph) -> Iterator[Place]:
    for each in graph.of("reduce-window"):
        yield each, "a reduce-window, as of cumsum", "multiply by a triangle of ones", "error"


def _custom_calls(graph: Graph) -> Iterator[Place]:
    for each in graph.of("custom-call"):
        if each.custom_call_target not in CUSTOM_CALLS:
            problem = f"custom call {each.custom_call_target} is not one that the compiler knows"
            yield each, problem, "express it in HLO operators", "error"


def _types(graph: Graph) -> Iterator[Place]:
    reported = set()
    for each in graph.by_id.values():
        name = hlo.dtype_name(each.shape)
        remedy = _type_remedy(name, graph.target)
        if remedy is not None and (name, each.opcode) not in reported:
            reported.add((name, each.opcode))
            yield each, f"type {name} does not run on {graph.target}", remedy, "error"


def _type_remedy(name: str, target: str) -> str | None:
    if name.startswith("complex"):
        return "compute with real numbers"
    if name in ("float64", "int64", "uint64"):
        return "use the 32-bit type"
    if name.endswith("fnuz"):
        return "use float8_e4m3 or float8_e5m2"
    if name == "float8_e4m3fn" and target in ("inf2", "trn1", "trn2", "hlo"):
        return "use bfloat16, or float8_e4m3 scaled to 240"
    return "use float8_e4m3fn" if name == "float8_e4m3" and target == "trn3" else None


def _dynamic_shapes(graph: Graph) -> Iterator[Place]:
    for each in graph.by_id.values():
        if any(each.shape.is_dynamic_dimension) or any(size < 0 for size in each.shape.dimensions):
            yield each, f"shape {list(each.shape.dimensions)} is dynamic", "compute it with a fixed size", "error"


def _sorts(graph: Graph) -> Iterator[Place]:
    remedy = f"use torch.topk of floating-point scores with k <= {TOPK_LIMIT}"
    for each in graph.of("sort"):
        keys = graph.operands(each)[0].shape
        axis = each.dimensions[0]
        kept = _largest_kept(graph, each, axis)
        if hlo.dtype_name(keys) in _INTEGERS:
            yield each, f"a top-k of {hlo.dtype_name(keys)}", remedy, "error"
        if kept > TOPK_LIMIT and kept < keys.dimensions[axis]:
            limit = "also the compiler's" if kept > LARGEST_SORT else "the sampler's"
            yield each, f"a top-k with k = {kept}, above {limit} limit", remedy, "error"
        elif kept == keys.dimensions[axis] and kept > TOPK_LIMIT:
            yield each, f"a full sort of {kept} values", remedy, "error"


def _largest_kept(graph: Graph, sort: Any, axis: int) -> int:
    """How many sorted values the rest of the graph looks at, at most."""
    pending = list(graph.users[sort.id])
    kept = 0
    while pending:
        user = pending.pop()
        if user.opcode in ("get-tuple-element", "convert"):
            pending += graph.users[user.id]
        elif user.opcode == "slice":
            kept = max(kept, user.slice_dimensions[axis].limit)
        else:
            kept = max(kept, graph.operands(sort)[0].shape.dimensions[axis])
    return kept


def _integer_compute(graph: Graph) -> Iterator[Place]:
    for each in graph.of("dot"):
        if hlo.dtype_name(graph.operands(each)[0].shape) in _INTEGERS:
            yield each, "a matrix product of integers", "convert to float32 first", "error"
    for each in graph.of("scatter", "all-reduce", "reduce-scatter"):
        if hlo.dtype_name(each.shape) in _INTEGERS and _combines(graph, each):
            yield each, f"an integer {each.opcode} is computed in float32", "compute it in float32 yourself", "error"
    for each in graph.of("power"):
        if hlo.dtype_name(each.shape) in _INTEGERS:
            yield each, "an integer power", "multiply, or convert to float32", "error"
    for each in graph.of("shift-right-arithmetic"):
        if hlo.dtype_name(each.shape) not in ("int32", "uint32"):
            yield each, "an arithmetic shift of other than 32 bits", "convert to int32 first", "error"


def _combines(graph: Graph, instruction: Any) -> bool:
    """Whether the called computation computes, rather than take the new value."""
    computation = graph.computations[instruction.called_computation_ids[0]]
    return bool(graph.by_id[computation.root_id].opcode != "parameter")


def _slices(graph: Graph) -> Iterator[Place]:
    for each in graph.of("dynamic-slice", "dynamic-update-slice"):
        indices = graph.operands(each)[1 if each.opcode == "dynamic-slice" else 2 :]
        if any(index.opcode != "constant" for index in indices):
            yield each, f"a {each.opcode} whose start is computed", "use gather, scatter or index_select", "error"


def _index_ranges(graph: Graph) -> Iterator[Place]:
    for each in graph.of("gather", "scatter"):
        operand, indices = graph.operands(each)[:2]
        if each.opcode == "gather":
            dims = each.gather_dimension_numbers.start_index_map
        else:
            dims = each.scatter_dimension_numbers.scatter_dims_to_operand_dims
        largest = _largest_index(graph, indices)
        if len(dims) == 1 and largest is not None and largest >= operand.shape.dimensions[dims[0]]:
            size = operand.shape.dimensions[dims[0]]
            problem = f"index {largest} of a {each.opcode} is beyond dimension {dims[0]} of size {size}"
            yield each, problem, "the device has no clamping: send it to a row that exists", "error"


def _largest_index(graph: Graph, index: Any) -> int | None:
    """The largest value, where it is known from an iota or a constant."""
    while index.opcode in _SHAPE_ONLY:
        index = graph.operands(index)[0]
    if index.opcode == "iota":
        return int(index.shape.dimensions[index.dimensions[0] if index.dimensions else 0]) - 1
    if index.opcode == "constant" and index.literal.s32s:
        return int(max(index.literal.s32s))
    return None


def _constants(graph: Graph) -> Iterator[Place]:
    for each in graph.of("constant"):
        size = hlo.byte_count(each.shape)
        if size > CONSTANT_LIMIT:
            problem = f"a constant of {size:,} bytes, above {CONSTANT_LIMIT:,}"
            yield each, problem, "make it a buffer of the model, so that it comes with the weights", "error"
        if any(not math.isfinite(value) for value in each.literal.f32s) and not _is_initial_value(graph, each):
            yield each, "a constant that is infinite or NaN", "mask with a finite number, as -3e4", "error"


def _is_initial_value(graph: Graph, constant: Any) -> bool:
    """The largest of nothing is minus infinity: every reduce starts there."""
    users = graph.users[constant.id]
    return bool(users) and all(
        user.opcode == "reduce" and constant.id in user.operand_ids[len(user.operand_ids) // 2 :] for user in users
    )


def _convolutions(graph: Graph) -> Iterator[Place]:
    for each in graph.of("convolution"):
        dilated = [each.base_dilation > 1 for each in each.window.dimensions]
        if any(dilated) and any(dimension.window_dilation > 1 for dimension in each.window.dimensions):
            yield each, "a convolution that dilates its input and its kernel", "dilate one of them only", "error"


def _aliases(graph: Graph) -> Iterator[Place]:
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
        if output.opcode == "parameter":
            yield parameter, "an output that is an input needs a copy", "leave it out, or update it", "error"
    for binding in graph.io.inputs:
        if binding.role == "state" and binding.name not in aliased:
            yield None, f"state {binding.name} is not updated in place", remedy, "error"


def _bindings(graph: Graph) -> Iterator[Place]:
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


def _collectives(graph: Graph) -> Iterator[Place]:
    everyone = [list(range(graph.io.world_size))]
    for each in graph.of("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"):
        groups = [list(group.replica_ids) for group in each.replica_groups]
        if groups != everyone:
            problem = f"replica groups {groups}, for {graph.io.world_size} ranks"
            yield each, problem, "let all ranks take part in one group", "error"
    for each in graph.of("partition-id", "replica-id"):
        yield each, "a rank as part of the program", "pass the rank as a weight", "error"


def _memory(graph: Graph) -> Iterator[Place]:
    chip = CHIPS.get(graph.target)
    needed = sum(hlo.byte_count(each.shape) for each in hlo.parameters(graph.module))
    if chip is not None and needed > chip.core_hbm:
        problem = f"{needed / GIB:.1f} GiB of weights and KV cache for a core of {chip.core_hbm / GIB:.0f} GiB"
        yield None, problem, "raise --tensor-parallel-size; optimum-cli neuron estimate tells what fits", "error"


RULES = (
    Rule("opcode", "EVRF001", _opcodes),
    Rule("control-flow", "EVRF001", _control_flow),
    Rule("host-transfer", "EVRF001", _host_transfers),
    Rule("random", "EVRF006", _random),
    Rule("reduce-window", "EVRF017", _reduce_windows),
    Rule("custom-call", "EVRF015", _custom_calls),
    Rule("type", "EVRF004, EVRF005, EVRF051, ESPP004", _types),
    Rule("dynamic-shape", "EMOD025", _dynamic_shapes),
    Rule("top-k", "EVRF013, EVRF014, EVRF029", _sorts),
    Rule("integer-compute", "EVRF016, EVRF022, EVRF035, EVRF060-063", _integer_compute),
    Rule("dynamic-slice", "EVRF001", _slices),
    Rule("index-range", "EVRF031, EVRF056, NRT 1006", _index_ranges),
    Rule("constant", "NRT 1003", _constants),
    Rule("convolution", "EVRF010, EVRF011", _convolutions),
    Rule("alias", "EVRF064", _aliases),
    Rule("binding", "EVRF064", _bindings),
    Rule("collective", "", _collectives),
    Rule("memory", "EVRF009, EOOM001", _memory),
)
