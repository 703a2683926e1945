# SPDX-License-Identifier: Apache-2.0
"""Rules about numbers and shapes: types, ranges, constants, and what is computed in another type than written."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ..graphs import hlo
from .graph import INTEGERS, LintGraph, Place


# An operator's result holds what its operand does.
_KEEPS_VALUES = {"parameter", "reshape", "bitcast", "copy", "slice", "gather", "transpose", "broadcast", "scatter", "select"}  # fmt: skip
_LARGEST_FP8 = 240.0  # of float8_e4m3, which all but trn3 have
CONSTANT_LIMIT = 1 << 20  # bytes; beyond, compile times grow: such tables belong with the weights
# A power of two above half of the largest number of a type: two that are as large add up to infinity.
MASK_LIMITS = {"float32": 2.0**127, "bfloat16": 2.0**127, "float16": 2.0**15}


def types(graph: LintGraph) -> Iterator[Place]:
    """Error codes EVRF004, EVRF005, EVRF051, EVRF052, ESFH002 and ESPP004 of the SDK.

    By an option (sdk/flags.py), the compiler takes float8_e4m3fn for e4m3 before trn3, which ends at 240: weights are rounded so, but
    computed numbers might be larger, unless they are clamped.
    """
    reported = set()
    for each in graph.by_id.values():
        name = hlo.dtype_name(each.shape)
        remedy = None if _is_clamped(graph, each) else _type_remedy(name, each.opcode, graph.target)
        if remedy is not None and (name, each.opcode) not in reported:
            reported.add((name, each.opcode))
            yield each, f"type {name} does not run on {graph.target}", remedy, "error"


def _is_clamped(graph: LintGraph, instruction: Any) -> bool:
    """Return whether a number is converted to fp8 after a clamp to what all targets with fp8 represent."""
    if instruction.opcode != "convert":
        return False
    source = graph.origin(graph.operands(instruction)[0])
    bounds = graph.operands(source)[::2] if source.opcode == "clamp" else []
    constants = [graph.origin(each) for each in bounds]
    return bool(constants) and all(
        each.opcode == "constant" and all(abs(value) <= _LARGEST_FP8 for value in hlo.literal_values(each))
        for each in constants
    )


def _type_remedy(name: str, opcode: str, target: str) -> str | None:
    if name.startswith("complex"):
        return "compute with real numbers"
    if name in ("float64", "int64", "uint64"):
        return "use the 32-bit type"
    if name.endswith("fnuz"):
        return "use float8_e4m3 or float8_e5m2"
    if name == "float8_e4m3fn" and target != "trn3" and opcode not in _KEEPS_VALUES:
        return "use bfloat16, or float8_e4m3 scaled to 240"
    return "use float8_e4m3fn" if name == "float8_e4m3" and target == "trn3" else None


def dynamic_shapes(graph: LintGraph) -> Iterator[Place]:
    """Error code EMOD025 of the SDK."""
    for each in graph.by_id.values():
        if any(each.shape.is_dynamic_dimension) or any(size < 0 for size in each.shape.dimensions):
            yield each, f"shape {list(each.shape.dimensions)} is dynamic", "compute it with a fixed size", "error"


def integer_compute(graph: LintGraph) -> Iterator[Place]:
    """Error codes EVRF016, EVRF022, EVRF035 and EVRF060 to EVRF063 of the SDK: float32 is exact up to 2^24 only."""
    for each in graph.of("dot"):
        if hlo.dtype_name(graph.operands(each)[0].shape) in INTEGERS:
            yield each, "a matrix product of integers", "convert to float32 first", "error"
    for each in graph.of("scatter", "all-reduce", "reduce-scatter"):
        called = graph.computations[each.called_computation_ids[0]]
        computes = graph.by_id[called.root_id].opcode != "parameter"  # else it takes the new value
        if computes and hlo.dtype_name(each.shape) in INTEGERS:
            yield each, f"an integer {each.opcode} is computed in float32", "compute it in float32 yourself", "error"
    for each in graph.of("power"):
        if hlo.dtype_name(each.shape) in INTEGERS:
            yield each, "an integer power", "multiply, or convert to float32", "error"
    for each in graph.of("shift-right-arithmetic"):
        if hlo.dtype_name(each.shape) not in ("int32", "uint32"):
            yield each, "an arithmetic shift of other than 32 bits", "convert to int32 first", "error"


def unsigned(graph: LintGraph) -> Iterator[Place]:
    """longdct/vllm-neuron, neuron-lowering-pitfalls.md: uint32 is lost unless the cast is last; a top-k's -1 is 4294967295."""
    remedy = "compute with int32, and convert to uint32 last"
    for each in graph.by_id.values():
        if each.opcode == "tuple" or hlo.dtype_name(each.shape) == "uint32":
            continue
        if each.opcode != "convert" and any(hlo.dtype_name(one.shape) == "uint32" for one in graph.operands(each)):
            yield each, f"{each.opcode} of uint32", remedy, "error"
    for each in graph.by_id.values():
        if hlo.dtype_name(each.shape) == "uint32" and each.opcode not in ("convert", "get-tuple-element", "parameter"):
            yield each, f"{each.opcode} as uint32", remedy, "error"


def index_ranges(graph: LintGraph) -> Iterator[Place]:
    """Error codes EVRF031 and EVRF056 of the SDK; nrt_status.rst, 1006: a device neither clamps nor drops indices."""
    for each in graph.of("gather", "scatter"):
        operand, indices = graph.operands(each)[:2]
        dims = each.gather_dimension_numbers.start_index_map
        if each.opcode == "scatter":
            dims = each.scatter_dimension_numbers.scatter_dims_to_operand_dims
        largest = _largest_index(graph, indices)
        size = operand.shape.dimensions[dims[0]] if len(dims) == 1 else math.inf
        if largest is not None and largest >= size:
            problem = f"index {largest} of a {each.opcode} is beyond dimension {dims[0]} of size {size}"
            yield each, problem, "the device has no clamping: send it to a row that exists", "error"


def _largest_index(graph: LintGraph, index: Any) -> int | None:
    """Return the largest value where an iota or a constant shows it, else None."""
    index = graph.origin(index)
    if index.opcode == "iota":
        return int(index.shape.dimensions[index.dimensions[0] if index.dimensions else 0]) - 1
    if index.opcode == "constant" and index.literal.s32s:
        return int(max(index.literal.s32s))
    return None


def constants(graph: LintGraph) -> Iterator[Place]:
    """nrt_status.rst of the SDK, 1003: a step in which a NaN appears has failed; inf - inf is one."""
    for each in graph.of("constant"):
        size = hlo.byte_count(each.shape)
        if size > CONSTANT_LIMIT:
            problem = f"a constant of {size:,} bytes, above {CONSTANT_LIMIT:,}"
            yield each, problem, "make it a buffer of the model, so that it comes with the weights", "error"
        if any(not math.isfinite(value) for value in hlo.literal_values(each)) and not _is_initial_value(graph, each):
            yield each, "a constant that is infinite or NaN", "mask with a finite number, as -3e4", "error"


def _is_initial_value(graph: LintGraph, constant: Any) -> bool:
    """The largest of nothing is minus infinity: every reduce starts there."""
    users = graph.users[constant.id]
    starts = (user.operand_ids[len(user.operand_ids) // 2 :] for user in users if user.opcode == "reduce")
    return bool(users) and sum(constant.id in each for each in starts) == len(users)


def mask_sums(graph: LintGraph) -> Iterator[Place]:
    """nrt_status.rst of the SDK, 1003: two masks of the lowest numbers add up to minus infinity, and a row of it to NaN."""
    for each in graph.of("add"):
        limit = MASK_LIMITS.get(hlo.dtype_name(each.shape), math.inf)
        if all(_is_mask(graph, operand, limit) for operand in graph.operands(each)):
            yield each, "a sum of two masks of the lowest numbers", "combine what they hide, and mask once", "error"


def _is_mask(graph: LintGraph, instruction: Any, limit: float) -> bool:
    source = graph.origin(instruction)
    if source.opcode == "constant":
        return any(value <= -limit for value in hlo.literal_values(source))
    operands = graph.operands(source)
    if source.opcode == "select":
        return any(_is_mask(graph, choice, limit) for choice in operands[1:])
    # torch-xla multiplies what is added by 1
    return source.opcode == "multiply" and any(
        _is_one(graph, factor) and _is_mask(graph, mask, limit) for factor, mask in (operands, reversed(operands))
    )


def _is_one(graph: LintGraph, instruction: Any) -> bool:
    source = graph.origin(instruction)
    return source.opcode == "constant" and list(hlo.literal_values(source)) == [1.0]


def dead_operands(graph: LintGraph) -> Iterator[Place]:
    """longdct/vllm-neuron, neuron-lowering-pitfalls.md: a rotary suffix became zeros in a concatenation of rank 4."""
    for each in graph.of("concatenate"):
        last = len(each.shape.dimensions) - 1
        if last < 3 or list(each.dimensions) != [last]:
            continue
        for operand in graph.operands(each):
            source = graph.origin(operand)
            if source.opcode == "constant" and not any(hlo.literal_values(source)):
                yield each, "a concatenation with zeros in place of a tensor", "overwrite columns, or use pad", "error"
