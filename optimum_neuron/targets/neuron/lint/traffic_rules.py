# SPDX-License-Identifier: Apache-2.0
"""Rules about bytes that a graph moves without need. All are warnings: such a graph is slow, and compiles.

A product takes both of its operands with the dimension that it sums over in front (on the partitions of SBUF: `nki.isa.nc_matmul` in
the SDK's documentation), so a weight is stored with its inputs first. A transpose in every step costs what reading the weight costs, or
more. Codes of weights and caches stay codes until a product takes them: a copy as numbers is two or four times as large.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from ..graphs import hlo
from ..sdk.hardware import MIB, chip_of
from .graph import LintGraph, Place


LARGEST_COPY = 1 << 20  # bytes: less stays in a core
_CODES = ("int8", "uint8", "float8_e4m3fn")
_ELEMENTWISE = frozenset({"multiply", "add", "subtract", "divide", "negate", "and", "select", "maximum", "compare"})
_SAME_ORDER = frozenset({"reshape", "bitcast", "copy", "convert", "slice", "broadcast", "concatenate"})


def transposed_weights(graph: LintGraph) -> Iterator[Place]:
    """A weight that a graph transposes, or that a product takes with another dimension in front."""
    weights = set(graph.io.names("weight"))
    remedy = "store it in the order in which the product takes it; optimum-cli export neuron does"
    for each in graph.of("transpose"):
        operand = graph.operands(each)[0]
        if not changes_order(each, operand):
            continue
        name = _find_weight(graph, operand, weights)
        if name:
            yield each, f"the weight {name} is transposed in every step", remedy, "warning"
    for each in graph.of("dot"):
        right = graph.operands(each)[1]
        numbers = each.dot_dimension_numbers
        batch, summed = numbers.rhs_batch_dimensions, numbers.rhs_contracting_dimensions
        name = _find_weight(graph, right, weights)
        if name and any(dim not in range(len(batch) + len(summed)) for dim in summed):
            yield each, f"a product sums over dimension {summed[0]} of the weight {name}", remedy, "warning"


def scaled_weights(graph: LintGraph) -> Iterator[Place]:
    """A quantized weight that is multiplied by its scale before a product with fewer numbers to scale, or copied for several readers.

    operators/codes.py counts both forms; that the compiler may keep the copy in memory is reported of int4 weights.
    """
    codes = {each.name for each in graph.io.inputs if each.role == "weight" and each.dtype in _CODES}
    copies: dict[int, set[int]] = defaultdict(set)
    for dot in graph.of("dot"):
        left, right = graph.operands(dot)
        summed = math.prod(right.shape.dimensions[dim] for dim in dot.dot_dimension_numbers.rhs_contracting_dimensions)
        for weight, other in ((left, right), (right, left)):
            cone = _find_cone(graph, weight)
            name = next((each.name for each in cone if each.opcode == "parameter" and each.name in codes), "")
            if not name:
                continue
            batch = math.prod(weight.shape.dimensions[dim] for dim in dot.dot_dimension_numbers.rhs_batch_dimensions)
            rows = math.prod(other.shape.dimensions) // (summed * batch)
            outputs = math.prod(weight.shape.dimensions) // (summed * batch)
            for each in cone:
                scales = _count_scales(graph, each, codes) if each.opcode == "multiply" else 0
                if scales and (scales <= outputs or 2 * rows * scales <= summed * batch * outputs):
                    problem = f"the weight {name} is scaled before a product of {rows} rows"
                    yield each, problem, "scale the product, or that of each group of inputs", "warning"
                if each.opcode == "convert" and hlo.dtype_name(graph.operands(each)[0].shape) in _CODES:
                    copies[each.id].add(dot.id)
    for number, dots in copies.items():
        each = graph.by_id[number]
        if len(dots) > 1 and hlo.byte_count(each.shape) > LARGEST_COPY:
            size = hlo.byte_count(each.shape) / (1 << 20)
            yield (
                each,
                f"{len(dots)} products read one copy of {size:.0f} MiB of a weight's codes",
                "join them",
                "warning",
            )


def _find_cone(graph: LintGraph, each: Any) -> list[Any]:
    """Return what an operand is computed from, number by number."""
    found, pending = {each.id: each}, [each]
    for one in pending:
        if one.opcode in _SAME_ORDER or one.opcode in _ELEMENTWISE:
            for operand in graph.operands(one):
                if operand.id not in found:
                    found[operand.id] = operand
                    pending.append(operand)
    return list(found.values())


def _count_scales(graph: LintGraph, multiply: Any, codes: set[str]) -> int:
    """Count the scales, which come with the weights, that a weight's codes are multiplied by."""
    sides = graph.operands(multiply)
    cones = [_find_cone(graph, side) for side in sides]
    coded = [any(each.opcode == "parameter" and each.name in codes for each in cone) for cone in cones]
    if sum(coded) != 1:
        return 0
    scale = sides[coded.index(False)]
    own = set(graph.io.names("weight"))
    if not any(each.opcode == "parameter" and each.name in own for each in cones[coded.index(False)]):
        return 0
    while scale.opcode in ("broadcast", "reshape", "bitcast", "copy", "convert"):
        scale = graph.operands(scale)[0]
    return math.prod(scale.shape.dimensions)


def changes_order(transpose: Any, operand: Any) -> bool:
    """Return whether values change places: not where only dimensions of size 1 do."""
    kept = [dim for dim in transpose.dimensions if operand.shape.dimensions[dim] != 1]
    return kept != sorted(kept) and math.prod(operand.shape.dimensions) > 1


def _find_weight(graph: LintGraph, each: Any, weights: set[str]) -> str:
    """Return the weight that an instruction's result is, or has parts of; empty where it is computed."""
    pending = [each]
    while pending:
        each = pending.pop()
        if each.opcode == "parameter" and each.name in weights:
            name: str = each.name
            return name
        if each.opcode in _SAME_ORDER:
            pending += graph.operands(each)
    return ""


# What lies between the exponentials of a softmax and the product with values.
_BETWEEN = {"convert", "multiply", "divide", "reshape", "broadcast", "transpose", "bitcast", "copy"}


def attention_scores(graph: LintGraph) -> Iterator[Place]:
    """Weights that a product takes, with the float32 scores that they are made of: no more than a core's own memory.

    What does not fit is written to device memory and read again by each step of a softmax (SBUF sizes: Neuron SDK documentation,
    about-neuron/arch/neuron-hardware).
    """
    limit = chip_of(graph.target).sbuf
    for each in graph.of("exponential"):
        weights = _find_multiplied(graph, each)
        if weights is None:
            continue
        needed = hlo.byte_count(each.shape) + hlo.byte_count(weights.shape)
        if needed > limit:
            problem = f"{needed / MIB:.1f} MiB of attention scores and weights for {limit / MIB:.0f} MiB inside a core"
            yield each, problem, "attend over fewer columns at a time, and merge the results", "warning"


def _find_multiplied(graph: LintGraph, exponentials: Any) -> Any | None:
    """Return the operand of a product that is these exponentials, scaled or not; None where there is none."""
    count = math.prod(exponentials.shape.dimensions)
    pending, seen = [exponentials], {exponentials.id}
    for each in pending:
        for user in graph.users[each.id]:
            if user.opcode == "dot":
                return each
            same_size = math.prod(user.shape.dimensions) == count
            if user.opcode in _BETWEEN and same_size and user.id not in seen:
                seen.add(user.id)
                pending.append(user)
    return None


_STATE_CODES = ("int8", "float8_e4m3fn")
# A state, and what it becomes by an update in place, as a whole.
_WHOLE = frozenset({"reshape", "bitcast", "copy", "transpose", "scatter", "dynamic-update-slice"})
_PART = frozenset({"slice", "dynamic-slice", "gather", "broadcast"})


def coded_states(graph: LintGraph) -> Iterator[Place]:
    """Codes of a cache that become numbers as a whole, or that another operator than a product reads as numbers."""
    states = {each.name for each in graph.io.inputs if each.role == "state" and each.dtype in _STATE_CODES}
    for each in graph.of("convert"):
        state, is_part = _find_state(graph, graph.operands(each)[0], states)
        if state is None:
            continue
        size = hlo.byte_count(each.shape)
        if not is_part and math.prod(each.shape.dimensions) == math.prod(state.shape.dimensions):
            problem = f"all codes of {state.name} become numbers, {size:,} bytes"
            yield each, problem, "choose what a step attends over first", "warning"
        elif size > LARGEST_COPY and (reader := _find_reader(graph, each)):
            problem = f"{size:,} bytes of numbers that codes of {state.name} stand for are read by {reader}"
            yield each, problem, "let a product take the codes, and scale what it gives", "warning"


def _find_state(graph: LintGraph, each: Any, states: set[str]) -> tuple[Any | None, bool]:
    """Return the state that codes belong to, or None, and whether they are a part of it."""
    is_part = False
    while each.opcode in _WHOLE or each.opcode in _PART:
        is_part = is_part or each.opcode in _PART
        each = graph.operands(each)[0]
    return (each if each.opcode == "parameter" and each.name in states else None), is_part


def _find_reader(graph: LintGraph, numbers: Any) -> str:
    """Return the first operator but products that takes these numbers, wherever they were moved to; empty where there is none."""
    pending = [numbers]
    for each in pending:
        for user in graph.users[each.id]:
            if user.opcode in _WHOLE or user.opcode in _PART:
                pending.append(user)
            elif user.opcode != "dot":
                return str(user.opcode)
    return ""
