# SPDX-License-Identifier: Apache-2.0
"""Weights as products take them: no weight is transposed, and layers that read one tensor are one product.

The rewrite looks at a graph alone, not at the model's classes. A weight that a graph reorders, by a linear layer or otherwise, is stored
in that order. Weights of linear layers that read the very same tensor are stored side by side. A weight that is also read as it is, such
as an embedding that is tied to the head, is stored in both forms.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from ....step.features.codes.weight import PACKED
from ..operators.codes import QUANTIZED_EXPERTS, QUANTIZED_LINEAR, STORED_PRODUCT, blocks_of
from ..sharding.weights import FileWeight, WeightLayout


_ATEN = torch.ops.aten
LINEAR = _ATEN.linear.default
_PERMUTE = _ATEN.permute.default
_CAST = _ATEN._to_copy.default
_ASSERT = _ATEN._assert_tensor_metadata.default  # reads no value
# Where a linear layer has its bias. Where a quantized one has codes, scales and, if any, shifts; a bias, or the numbers of experts; the kind.
_BIAS = 2
_TENSORS, _OTHER, _KIND = slice(1, 4), 4, 5


@dataclass(frozen=True)
class _Use:
    """A linear layer, of the input `x`, or a change of order; of a weight that may be cast before."""

    node: Node
    weight: Node
    cast: Node | None
    order: tuple[int, ...]
    x: Node | None


# Codes, scales, and shifts or None, of quantized layers that become one product, with the nodes of which each is made.
_StoredParts = list[tuple[FileWeight, list[Node]] | None]


class _StoredUses:
    """The uses of a program's weights: groups that become one, in the order of the first of each, and weights that nothing else reads."""

    def __init__(self, program: ExportedProgram) -> None:
        nodes = (node for node in program.graph.nodes if node.op == "placeholder")
        specs = zip(nodes, program.graph_signature.input_specs, strict=True)
        self.weights = {node: spec.target for node, spec in specs if spec.target and spec.target.startswith("model.")}
        uses = _find_uses(program.graph, self.weights)
        readers: dict[Node, list[_Use]] = defaultdict(list)
        for use in uses:
            readers[use.weight].append(use)
        groups: dict[Any, list[_Use]] = defaultdict(list)
        for use in uses:
            alone = use.x is None or use.cast is not None or len(readers[use.weight]) > 1
            groups[use.node if alone else (use.x, use.weight.meta["val"].dtype)].append(use)
        self.groups = list(groups.values())
        self.quantized = _group_quantized(program.graph, self.weights)
        self.parts = {stored: nodes for _, each in self.quantized for stored, nodes in filter(None, each)}
        layers = {layer for group, _ in self.quantized for layer in group}
        self.replaced = {node for nodes in self.parts.values() for node in nodes if set(node.users) <= layers}
        for weight, own in readers.items():
            casts = {use.cast for use in own if use.cast is not None}
            users = {user for reader in (weight, *casts) for user in reader.users if user.target != _ASSERT}
            if users <= casts | {use.node for use in own}:
                self.replaced.add(weight)

    def make_weight(self, group: list[_Use]) -> FileWeight:
        return FileWeight(tuple(self.weights[use.weight] for use in group), group[0].order)


def weight_layout(program: ExportedProgram) -> WeightLayout:
    """Return how the weights of a program are stored; it is decomposed but for linear layers."""
    uses = _StoredUses(program)
    stored = dict.fromkeys([*map(uses.make_weight, uses.groups), *uses.parts])
    return WeightLayout(tuple(stored), frozenset(uses.weights[node] for node in uses.replaced))


def use_stored_weights(program: ExportedProgram) -> tuple[dict[Node, str], set[Node]]:
    """Change a program's graph, in place, to take its weights as `weight_layout` has them.

    Return new placeholders after all others, with the names of what is stored; and placeholders without a user.
    """
    graph, uses = program.graph, _StoredUses(program)
    placeholders: dict[FileWeight, Node] = {}
    last = next(node for node in reversed(graph.nodes) if node.op == "placeholder")
    for group in uses.groups:
        stored = uses.make_weight(group)
        if stored not in placeholders:
            last = placeholders[stored] = _add_placeholder(graph, last, stored, [use.weight for use in group])
        _rewrite_group(graph, group, placeholders[stored])
    for stored, parts in uses.parts.items():
        last = placeholders[stored] = _add_placeholder(graph, last, stored, parts)
    for layers, made in uses.quantized:
        _rewrite_quantized(graph, layers, [None if each is None else placeholders[each[0]] for each in made])
    graph.eliminate_dead_code()
    return {node: stored.name for stored, node in placeholders.items()}, uses.replaced


def _find_uses(graph: Graph, weights: Mapping[Node, str]) -> list[_Use]:
    uses = []
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in (LINEAR, _PERMUTE):
            continue
        is_linear = node.target == LINEAR
        taken: Any = node.args[1 if is_linear else 0]
        cast = taken if taken.target == _CAST else None
        weight = taken if cast is None else cast.args[0]
        if weight in weights:
            rank = weight.meta["val"].dim()
            order = (1, 0) if is_linear else tuple(dim % rank for dim in node.args[1])
            if order != tuple(range(rank)):
                uses.append(_Use(node, weight, cast, order, node.args[0] if is_linear else None))
    return uses


def _group_quantized(graph: Graph, weights: Mapping[Node, str]) -> list[tuple[list[Node], _StoredParts]]:
    groups: dict[object, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.op == "call_function" and node.target in (QUANTIZED_LINEAR, QUANTIZED_EXPERTS):
            codes, scale, shift = node.args[_TENSORS]
            shared = node.target == QUANTIZED_EXPERTS or sum(user.target == node.target for user in codes.users) > 1
            form = (node.args[_KIND], scale.meta["val"].dtype, scale.meta["val"].shape[1], shift is None)
            groups[node if shared else (node.args[0], form)].append(node)
    found: list[tuple[list[Node], _StoredParts]] = []
    for layers in groups.values():
        of_scale: Any = layers[0].args[2]
        shape = of_scale.meta["val"].shape
        order = (1, 0) if len(shape) == 2 else (0, 2, 1)
        stored: _StoredParts = []
        for place, nodes in enumerate(zip(*(layer.args[_TENSORS] for layer in layers), strict=True)):
            blocks = blocks_of(shape[-1]) if not place and layers[0].args[_KIND] in PACKED else 0
            names = tuple(weights[node] for node in nodes if node is not None)
            stored.append((FileWeight(names, order, blocks), list(nodes)) if names else None)
        found.append((layers, stored))
    return found


def _add_placeholder(graph: Graph, last: Node, stored: FileWeight, parts: list[Node]) -> Node:
    shapes = {name: tuple(part.meta["val"].shape) for name, part in zip(stored.parts, parts, strict=True)}
    with graph.inserting_after(last):
        node = graph.placeholder(f"w_{stored.name}".replace(".", "_").replace("-", "_"))
    node.meta["val"] = torch.empty(stored.shape(shapes.__getitem__), dtype=parts[0].meta["val"].dtype, device="meta")
    return node


def _rewrite_group(graph: Graph, group: list[_Use], stored: Node) -> None:
    first, taken = group[0], stored
    with graph.inserting_before(first.node):
        if first.cast is not None:
            taken = _call_like(graph, first.node, _CAST, (stored,), dict(first.cast.kwargs))
        if first.x is None:
            first.node.replace_all_uses_with(taken)
            return
        x, width = first.node.args[0], first.weight.meta["val"].shape[1]  # first.x may be a layer rewritten before
        product = _call_like(graph, first.node, _ATEN.view.default, (x, [-1, width]))
        product = _call_like(graph, first.node, _ATEN.mm.default, (product, taken))
    _split_product(graph, product, [use.node for use in group], _BIAS)


def _rewrite_quantized(graph: Graph, layers: list[Node], stored: list[Node | None]) -> None:
    first = layers[0]
    x, *_, kind, tokens = first.args
    assert isinstance(x, Node)
    with graph.inserting_before(first):
        if first.target == QUANTIZED_EXPERTS:
            index = first.args[_OTHER]
            if index is not None:  # codes are gathered, not numbers
                stored = [
                    each and _call_like(graph, first, _ATEN.index_select.default, (each, 0, index)) for each in stored
                ]
            first.replace_all_uses_with(_call_like(graph, first, STORED_PRODUCT, (x, *stored, kind, tokens)))
            return
        flat = _call_like(graph, first, _ATEN.view.default, (x, [-1, x.meta["val"].shape[-1]]))
        product = _call_like(graph, first, STORED_PRODUCT, (flat, *stored, kind, tokens))
    _split_product(graph, product, layers, _OTHER)


def _split_product(graph: Graph, product: Node, layers: Sequence[Node], bias: int) -> None:
    """Give each layer its part of a product, with its bias: of a quantized one in float32, as the sum is."""
    start = 0
    for layer in layers:
        value = layer.meta["val"]
        stop = start + value.shape[-1]
        with graph.inserting_before(layer):
            part = product
            if len(layers) > 1:
                part = _call_like(graph, layer, _ATEN.slice.Tensor, (part, 1, start, stop))
            part = _call_like(graph, layer, _ATEN.view.default, (part, list(value.shape)))
            if len(layer.args) > bias and layer.args[bias] is not None:
                part = _call_like(graph, layer, _ATEN.add.Tensor, (part, layer.args[bias]))
            if layer.target == QUANTIZED_LINEAR:
                part = _call_like(graph, layer, _CAST, (part,), {"dtype": value.dtype})
        layer.replace_all_uses_with(part)
        start = stop


def _call_like(graph: Graph, like: Node, target: object, args: tuple, kwargs: dict | None = None) -> Node:
    node = graph.call_function(target, args, kwargs or {})  # type: ignore[arg-type]
    node.meta = {name: like.meta[name] for name in ("nn_module_stack",) if name in like.meta}
    return node
