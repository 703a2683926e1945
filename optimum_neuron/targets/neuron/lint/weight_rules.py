# SPDX-License-Identifier: Apache-2.0
"""The rule that weights come as products take them: to transpose one in every step costs what reading it costs, or more.

A product takes both of its operands with the dimension that it sums over in front (on the partitions of SBUF:
`nki.isa.nc_matmul` in the SDK's documentation), so a weight is to be stored with its inputs first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from .graph import Graph, Place


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
