# SPDX-License-Identifier: Apache-2.0
"""Weights as products take them: no weight is transposed, and layers that read one tensor are one product.

The rewrite looks at a graph alone, not at the model's classes. A weight that a graph reorders, by a linear layer or otherwise, is stored
in that order. Weights of linear layers that read the very same tensor are stored side by side. A weight that is also read as it is, such
as an embedding that is tied to the head, is stored in both forms.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from ....step.features.codes.weight import PACKED
from ..graphs.weight_layout import FileWeight, WeightLayout
from ..operators.codes import QUANTIZED_EXPERTS, QUANTIZED_LINEAR, STORED_PRODUCT, blocks_of


_ATEN = torch.ops.aten
LINEAR = _ATEN.linear.default
_PERMUTE = _ATEN.permute.default
_CAST = _ATEN._to_copy.default
_ASSERT = _ATEN._assert_tensor_metadata.default  # reads no value


@dataclass(frozen=True)
class _Use:
    """A linear layer or a change of order, of a weight that may be cast before."""

    node: Node
    weight: Node
    cast: Node | None
    order: tuple[int, ...]

    @property
    def reader(self) -> Node:
        """Return the node that reads the weight itself."""
        return self.node if self.cast is None else self.cast

    @property
    def x(self) -> Node | None:
        """Return the input of a linear layer."""
        return self.node.args[0] if self.node.target == LINEAR else None  # type: ignore[return-value]


def weight_layout(program: ExportedProgram) -> WeightLayout:
    """Return how the weights of a program are stored; it is decomposed but for linear layers."""
    weights = _list_weights(program)
    uses, quantized = _find_uses(program.graph, weights), quantized_groups(program.graph, weights)
    stored = dict.fromkeys(_make_file_weight(group, weights) for group in _group_uses(uses)) | stored_tensors(
        quantized
    )
    return WeightLayout(
        tuple(stored), frozenset(weights[node] for node in _find_replaced(uses) | replaced_tensors(quantized))
    )


def use_stored_weights(program: ExportedProgram) -> tuple[dict[Node, str], set[Node]]:
    """Change a program's graph, in place, to take its weights as `weight_layout` has them.

    Returns:
        New placeholders after all others, with the names of what is stored; and placeholders without a user.
    """
    graph, weights = program.graph, _list_weights(program)
    uses, quantized = _find_uses(graph, weights), quantized_groups(graph, weights)
    left = _find_replaced(uses) | replaced_tensors(quantized)
    placeholders: dict[FileWeight, Node] = {}
    last = next(node for node in reversed(graph.nodes) if node.op == "placeholder")
    for group in _group_uses(uses):
        stored = _make_file_weight(group, weights)
        if stored not in placeholders:
            last = placeholders[stored] = _add_placeholder(graph, last, stored, [use.weight for use in group])
        _rewrite_group(graph, group, placeholders[stored])
    for stored, parts in stored_tensors(quantized).items():
        last = placeholders[stored] = _add_placeholder(graph, last, stored, parts)
    for each in quantized:
        each.rewrite_graph(graph, placeholders)
    graph.eliminate_dead_code()
    return {node: stored.name for stored, node in placeholders.items()}, left


def _list_weights(program: ExportedProgram) -> dict[Node, str]:
    """Return the names of the model's own tensors, by placeholder."""
    nodes = (node for node in program.graph.nodes if node.op == "placeholder")
    named = ((node, spec.target or "") for node, spec in zip(nodes, program.graph_signature.input_specs, strict=True))
    return {node: name for node, name in named if name.startswith("model.")}


def _find_uses(graph: Graph, weights: Mapping[Node, str]) -> list[_Use]:
    uses = []
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in (LINEAR, _PERMUTE):
            continue
        taken: Any = node.args[1 if node.target == LINEAR else 0]
        cast = taken if taken.target == _CAST else None
        weight = taken if cast is None else cast.args[0]
        if weight in weights:
            rank = weight.meta["val"].dim()
            order = (1, 0) if node.target == LINEAR else tuple(dim % rank for dim in node.args[1])
            if order != tuple(range(rank)):
                uses.append(_Use(node, weight, cast, order))
    return uses


def _group_uses(uses: Iterable[_Use]) -> list[list[_Use]]:
    """Return uses that become one, in the order of the first of each."""
    of_weight: dict[Node, list[_Use]] = defaultdict(list)
    for use in uses:
        of_weight[use.weight].append(use)
    groups: dict[Any, list[_Use]] = defaultdict(list)
    for use in uses:
        alone = use.x is None or use.cast is not None or len(of_weight[use.weight]) > 1
        groups[use.node if alone else (use.x, use.weight.meta["val"].dtype)].append(use)
    return list(groups.values())


def _make_file_weight(group: list[_Use], weights: Mapping[Node, str]) -> FileWeight:
    return FileWeight(tuple(weights[use.weight] for use in group), group[0].order)


def _find_replaced(uses: Iterable[_Use]) -> set[Node]:
    """Return weights that nothing reads but these uses."""
    nodes: dict[Node, set[Node]] = defaultdict(set)
    for use in uses:
        nodes[use.weight] |= {use.node, use.reader}
    casts = {use.cast for use in uses if use.cast is not None}
    return {
        weight
        for weight, own in nodes.items()
        if all(_find_users(reader) <= own for reader in (weight, *(own & casts)))
    }


def _find_users(node: Node) -> set[Node]:
    return {user for user in node.users if user.target != _ASSERT}


def _add_placeholder(graph: Graph, last: Node, stored: FileWeight, parts: list[Node]) -> Node:
    shapes = {name: tuple(part.meta["val"].shape) for name, part in zip(stored.parts, parts, strict=True)}
    with graph.inserting_after(last):
        node = graph.placeholder(f"w_{stored.name}".replace(".", "_").replace("-", "_"))
    node.meta["val"] = torch.empty(stored.shape(shapes.__getitem__), dtype=parts[0].meta["val"].dtype, device="meta")
    return node


def _rewrite_group(graph: Graph, group: list[_Use], stored: Node) -> None:
    first = group[0]
    with graph.inserting_before(first.node):
        taken = stored
        if first.cast is not None:
            taken = call_like(graph, first.node, _CAST, (stored,), dict(first.cast.kwargs))
        if first.x is None:
            first.node.replace_all_uses_with(taken)
            return
        width = first.weight.meta["val"].shape[1]
        product = call_like(graph, first.node, _ATEN.view.default, (first.x, [-1, width]))
        product = call_like(graph, first.node, _ATEN.mm.default, (product, taken))
    start = 0
    for use in group:
        stop = start + use.weight.meta["val"].shape[0]
        with graph.inserting_before(use.node):
            part = product
            if len(group) > 1:
                part = call_like(graph, use.node, _ATEN.slice.Tensor, (product, 1, start, stop))
            part = call_like(graph, use.node, _ATEN.view.default, (part, list(use.node.meta["val"].shape)))
            if len(use.node.args) > 2 and use.node.args[2] is not None:
                part = call_like(graph, use.node, _ATEN.add.Tensor, (part, use.node.args[2]))
        use.node.replace_all_uses_with(part)
        start = stop


# Where the node of a quantized layer has codes, scales and, if any, shifts; and then a bias, or the numbers of experts, and the kind.
_TENSORS, _OTHER, _KIND = slice(1, 4), 4, 5


@dataclass(frozen=True)
class QuantizedGroup:
    """Quantized layers that become one product.

    Attributes:
        stored: codes, scales, and shifts or None, with the nodes of what each is made of.
    """

    layers: tuple[Node, ...]
    stored: tuple[tuple[FileWeight, list[Node]] | None, ...]

    def rewrite_graph(self, graph: Graph, placeholders: Mapping[FileWeight, Node]) -> None:
        """Make the graph multiply by what is stored; `placeholders` has all of that."""
        first = self.layers[0]
        x, *_, kind, tokens = first.args
        assert isinstance(x, Node)
        given = [None if each is None else placeholders[each[0]] for each in self.stored]
        if first.target == QUANTIZED_EXPERTS:
            self._rewrite_experts(graph, x, given)
            return
        with graph.inserting_before(first):
            flat = call_like(graph, first, _ATEN.view.default, (x, [-1, x.meta["val"].shape[-1]]))
            product = call_like(graph, first, STORED_PRODUCT, (flat, *given, kind, tokens))
        start = 0
        for layer in self.layers:
            value = layer.meta["val"]
            stop = start + value.shape[-1]
            with graph.inserting_before(layer):
                part = product
                if len(self.layers) > 1:
                    part = call_like(graph, layer, _ATEN.slice.Tensor, (part, 1, start, stop))
                part = call_like(graph, layer, _ATEN.view.default, (part, list(value.shape)))
                bias = layer.args[_OTHER]
                if bias is not None:
                    part = call_like(graph, layer, _ATEN.add.Tensor, (part, bias))  # in float32, as the sum is
                part = call_like(graph, layer, _ATEN._to_copy.default, (part,), {"dtype": value.dtype})
            layer.replace_all_uses_with(part)
            start = stop

    def _rewrite_experts(self, graph: Graph, x: Node, given: list[Node | None]) -> None:
        (layer,) = self.layers
        with graph.inserting_before(layer):
            index = layer.args[_OTHER]
            if index is not None:  # codes are gathered, not numbers
                given = [
                    None if each is None else call_like(graph, layer, _ATEN.index_select.default, (each, 0, index))
                    for each in given
                ]
            product = call_like(graph, layer, STORED_PRODUCT, (x, *given, *layer.args[_KIND:]))
        layer.replace_all_uses_with(product)


def quantized_groups(graph: Graph, weights: Mapping[Node, str]) -> list[QuantizedGroup]:
    """Return groups in the order of the first layer of each; `weights` are the model's tensors by placeholder."""
    groups: dict[object, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.op == "call_function" and node.target in (QUANTIZED_LINEAR, QUANTIZED_EXPERTS):
            codes, scale, shift = node.args[_TENSORS]
            shared = node.target == QUANTIZED_EXPERTS or sum(user.target == node.target for user in codes.users) > 1
            form = (node.args[_KIND], scale.meta["val"].dtype, scale.meta["val"].shape[1], shift is None)
            groups[node if shared else (node.args[0], form)].append(node)
    return [_make_group(tuple(layers), weights) for layers in groups.values()]


def _make_group(layers: tuple[Node, ...], weights: Mapping[Node, str]) -> QuantizedGroup:
    stored: list[tuple[FileWeight, list[Node]] | None] = []
    for place, nodes in enumerate(zip(*(layer.args[_TENSORS] for layer in layers), strict=True)):
        if nodes[0] is None:
            stored.append(None)
            continue
        scale, kind = layers[0].args[2], layers[0].args[_KIND]
        assert isinstance(scale, Node)
        shape = scale.meta["val"].shape
        blocks = blocks_of(shape[-1]) if not place and kind in PACKED else 0
        order = (1, 0) if len(shape) == 2 else (0, 2, 1)
        stored.append((FileWeight(tuple(weights[node] for node in nodes), order, blocks), list(nodes)))
    return QuantizedGroup(layers, tuple(stored))


def replaced_tensors(groups: list[QuantizedGroup]) -> set[Node]:
    """Return codes, scales and shifts that nothing reads but these layers."""
    layers = {layer for group in groups for layer in group.layers}
    return {node for _, nodes in _list_stored(groups) for node in nodes if set(node.users) <= layers}


def stored_tensors(groups: list[QuantizedGroup]) -> dict[FileWeight, list[Node]]:
    """Return all that is stored, with the nodes of what it is made of."""
    return dict(_list_stored(groups))


def _list_stored(groups: list[QuantizedGroup]) -> Iterator[tuple[FileWeight, list[Node]]]:
    yield from (each for group in groups for each in group.stored if each is not None)


def call_like(graph: Graph, like: Node, target: object, args: tuple, kwargs: dict | None = None) -> Node:
    """Add a node that belongs to the module of another."""
    node = graph.call_function(target, args, kwargs or {})  # type: ignore[arg-type]
    node.meta = {name: like.meta[name] for name in ("nn_module_stack",) if name in like.meta}
    return node
