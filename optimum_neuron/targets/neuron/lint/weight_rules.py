# SPDX-License-Identifier: Apache-2.0
"""The rules that weights come as products take them: to transpose one in every step costs what reading it costs, or more, and so does a
copy of a quantized one with its scale in it.

A product takes both of its operands with the dimension that it sums over in front (on the partitions of SBUF:
`nki.isa.nc_matmul` in the SDK's documentation), so a weight is to be stored with its inputs first.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from ..lowering import hlo
from .graph import Graph, Place


LARGEST_COPY = 1 << 20  # bytes: less stays in a core
_CODES = ("int8", "uint8", "float8_e4m3fn")
_ELEMENTWISE = frozenset({"multiply", "add", "subtract", "divide", "negate", "and", "select", "maximum", "compare"})
_SAME_ORDER = frozenset({"reshape", "bitcast", "copy", "convert", "slice", "broadcast", "concatenate"})


def transposed_weights(graph: Graph) -> Iterator[Place]:
    """A weight that a graph transposes, or that a product takes with another dimension in front. A warning: it is slow, and compiles."""
    weights = set(graph.io.names("weight"))
    remedy = "store it in the order in which the product takes it; optimum-cli export neuron does"
    for each in graph.of("transpose"):
        operand = graph.operands(each)[0]
        if not changes_order(each, operand):
            continue
        name = _weight(graph, operand, weights)
        if name:
            yield each, f"the weight {name} is transposed in every step", remedy, "warning"
    for each in graph.of("dot"):
        right = graph.operands(each)[1]
        numbers = each.dot_dimension_numbers
        batch, summed = numbers.rhs_batch_dimensions, numbers.rhs_contracting_dimensions
        name = _weight(graph, right, weights)
        if name and any(dim not in range(len(batch) + len(summed)) for dim in summed):
            yield each, f"a product sums over dimension {summed[0]} of the weight {name}", remedy, "warning"


def scaled_weights(graph: Graph) -> Iterator[Place]:
    """A quantized weight that is multiplied by its scale before a product, where the product has fewer numbers to scale; or a copy of one as
    numbers that several operators read. A warning: such a copy is twice or four times what is read of the weight, and compiles
    (quantized_product.py counts both forms; that the compiler may keep the copy in memory was told of int4 weights)."""
    codes = {each.name for each in graph.io.inputs if each.role == "weight" and each.dtype in _CODES}
    copies: dict[int, set[int]] = defaultdict(set)
    for dot in graph.of("dot"):
        left, right = graph.operands(dot)
        summed = math.prod(right.shape.dimensions[dim] for dim in dot.dot_dimension_numbers.rhs_contracting_dimensions)
        for weight, other in ((left, right), (right, left)):
            cone = _elementwise(graph, weight)
            name = next((each.name for each in cone if each.opcode == "parameter" and each.name in codes), "")
            if not name:
                continue
            batch = math.prod(weight.shape.dimensions[dim] for dim in dot.dot_dimension_numbers.rhs_batch_dimensions)
            rows = math.prod(other.shape.dimensions) // (summed * batch)
            outputs = math.prod(weight.shape.dimensions) // (summed * batch)
            for each in cone:
                scales = _scales(graph, each, codes) if each.opcode == "multiply" else 0
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


def _elementwise(graph: Graph, each: Any) -> list[Any]:
    """What an operand is computed from, number by number."""
    found, pending = {each.id: each}, [each]
    for one in pending:
        if one.opcode in _SAME_ORDER or one.opcode in _ELEMENTWISE:
            for operand in graph.operands(one):
                if operand.id not in found:
                    found[operand.id] = operand
                    pending.append(operand)
    return list(found.values())


def _scales(graph: Graph, multiply: Any, codes: set[str]) -> int:
    """How many scales, which come with the weights, a weight's codes are multiplied by."""
    sides = graph.operands(multiply)
    cones = [_elementwise(graph, side) for side in sides]
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
    """Whether values change places: not where only dimensions of size 1 do."""
    kept = [dim for dim in transpose.dimensions if operand.shape.dimensions[dim] != 1]
    return kept != sorted(kept) and math.prod(operand.shape.dimensions) > 1


def _weight(graph: Graph, each: Any, weights: set[str]) -> str:
    """The weight that an instruction's result is, or has parts of; empty where it is computed."""
    pending = [each]
    while pending:
        each = pending.pop()
        if each.opcode == "parameter" and each.name in weights:
            name: str = each.name
            return name
        if each.opcode in _SAME_ORDER:
            pending += graph.operands(each)
    return ""
