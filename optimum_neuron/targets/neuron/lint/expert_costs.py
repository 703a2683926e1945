# SPDX-License-Identifier: Apache-2.0
"""In which form a graph computes its routed experts, read from its HLO, and what that costs beside computing all of them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

from ....step.spec import GraphSpec
from ..expert_forms import ExpertForm, ExpertLayer, ExpertWork, all_experts, work
from ..graph_io import GraphIO
from ..lowering import hlo
from ..sdk.hardware import chip_of
from .graph import Graph


_MOVED = frozenset({"reshape", "bitcast", "copy", "convert", "broadcast"})


@dataclass(frozen=True)
class ExpertCost:
    """Layers of a graph whose experts are alike.

    Attributes:
        layers: how many there are.
        tokens: of a step.
        before, after: of all these layers, where every expert computes every token, and as the graph has it.
    """

    layer: ExpertLayer
    layers: int
    tokens: int
    form: ExpertForm
    before: ExpertWork
    after: ExpertWork

    def seconds(self, target: str) -> tuple[float, float]:
        """The roofline of both."""
        chip, dtype = chip_of(target), self.layer.dtype
        before, after = (chip.core_seconds(each.moved, {dtype: each.flops}) for each in (self.before, self.after))
        return before, after


@dataclass
class _Weight:
    """A weight `[experts, in, out]` and the products that take it: rows of each expert, and blocks that gather it."""

    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    own_rows: int = 0
    gathered: int = 0
    rows: int = 0
    part: int = 0


def expert_costs(name: str, data: bytes, io: GraphIO, target: str) -> list[ExpertCost]:
    """Return one per kind of layer and form of a step; raise ValueError where `data` is no HLO module."""
    if io.spec is None:
        return []
    tokens, chip = GraphSpec(**io.spec).tokens, chip_of(target)
    modules: dict[str, dict[str, _Weight]] = defaultdict(dict)
    for weight, use in _weights(Graph(name, hlo.parse(data), io, target)).items():
        module, _, parameter = weight.partition(".order_")[0].rpartition(".")
        modules[module][parameter] = use
    alike = Counter(filter(None, (_layer(weights, tokens) for weights in modules.values())))
    costs = []
    for (layer, form), layers in alike.items():
        before, after = (work(layer, tokens, each, chip) for each in (all_experts(tokens), form))
        costs.append(ExpertCost(layer, layers, tokens, form, before.times(layers), after.times(layers)))
    return costs


def _weights(graph: Graph) -> dict[str, _Weight]:
    names = set(graph.io.names("weight"))
    found: dict[str, _Weight] = {}
    for dot in graph.of("dot"):
        left, right = graph.operands(dot)
        weight, gathered = _source(graph, right)
        if weight.name not in names or len(weight.shape.dimensions) != 3 or len(right.shape.dimensions) != 3:
            continue
        shape, dtype = tuple(weight.shape.dimensions), hlo.dtype_name(weight.shape)
        use = found.setdefault(
            weight.name, _Weight(shape, dtype, hlo.byte_count(weight.shape) // max(math.prod(shape), 1))
        )
        count, rows = left.shape.dimensions[0], left.shape.dimensions[1]
        if gathered:
            use.gathered, use.rows, use.part = use.gathered + count, rows, max(use.part, count)
        else:
            use.own_rows = rows
    return found


def _source(graph: Graph, each: Any) -> tuple[Any, bool]:
    """What a product's weights are, or are gathered from."""
    gathered = False
    while each.opcode in _MOVED or each.opcode == "gather":
        gathered = gathered or each.opcode == "gather"
        each = graph.operands(each)[0]
    return each, gathered


def _layer(weights: dict[str, _Weight], tokens: int) -> tuple[ExpertLayer, ExpertForm] | None:
    """None for a module whose weights are not those of transformers' experts interface."""
    down = weights.get("down_proj")
    up = weights.get("gate_up_proj") or weights.get("up_proj")
    if down is None or up is None:
        return None
    form = ExpertForm(up.own_rows, up.gathered, up.rows, up.part)
    # Of blocks: the only number of which `(entries - 1) // rows` blocks follow, as rows are fewer than tokens.
    per_token = (form.gathered + (form.kind == "blocks")) * form.rows // tokens
    experts, hidden, width = up.shape
    return ExpertLayer(experts, per_token, hidden, width, down.shape[1], up.dtype, up.itemsize), form
