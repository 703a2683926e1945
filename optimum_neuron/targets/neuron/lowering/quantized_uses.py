# SPDX-License-Identifier: Apache-2.0
"""Has graphs take quantized weights as products want them: codes and scales with inputs first, of layers that read one tensor side by side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from ....step.features.codes.weight import PACKED
from ..quantized_product import QUANTIZED_EXPERTS, QUANTIZED_LINEAR, STORED_PRODUCT, blocks_of
from ..weight_layout import StoredWeight


_ATEN = torch.ops.aten
# Where the node of a quantized layer has codes, scales and, if any, shifts; and then a bias, or the numbers of experts, and the kind.
_TENSORS, _OTHER, _KIND = slice(1, 4), 4, 5


@dataclass(frozen=True)
class QuantizedGroup:
    """Quantized layers that become one product.

    Attributes:
        stored: codes, scales, and shifts or None, with the nodes of what each is made of.
    """

    layers: tuple[Node, ...]
    stored: tuple[tuple[StoredWeight, list[Node]] | None, ...]

    def rewrite(self, graph: Graph, placeholders: Mapping[StoredWeight, Node]) -> None:
        """Has the graph multiply by what is stored.

        Args:
            placeholders: of all that is.
        """
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
    return [_group(tuple(layers), weights) for layers in groups.values()]


def _group(layers: tuple[Node, ...], weights: Mapping[Node, str]) -> QuantizedGroup:
    stored: list[tuple[StoredWeight, list[Node]] | None] = []
    for place, nodes in enumerate(zip(*(layer.args[_TENSORS] for layer in layers), strict=True)):
        if nodes[0] is None:
            stored.append(None)
            continue
        scale, kind = layers[0].args[2], layers[0].args[_KIND]
        assert isinstance(scale, Node)
        shape = scale.meta["val"].shape
        blocks = blocks_of(shape[-1]) if not place and kind in PACKED else 0
        order = (1, 0) if len(shape) == 2 else (0, 2, 1)
        stored.append((StoredWeight(tuple(weights[node] for node in nodes), order, blocks), list(nodes)))
    return QuantizedGroup(layers, tuple(stored))


def replaced_tensors(groups: list[QuantizedGroup]) -> set[Node]:
    """Codes, scales and shifts that nothing reads but these layers."""
    layers = {layer for group in groups for layer in group.layers}
    return {node for _, nodes in _stored(groups) for node in nodes if set(node.users) <= layers}


def stored_tensors(groups: list[QuantizedGroup]) -> dict[StoredWeight, list[Node]]:
    """All that is stored, with the nodes of what it is made of."""
    return dict(_stored(groups))


def _stored(groups: list[QuantizedGroup]) -> Iterator[tuple[StoredWeight, list[Node]]]:
    yield from (each for group in groups for each in group.stored if each is not None)


def call_like(graph: Graph, like: Node, target: object, args: tuple, kwargs: dict | None = None) -> Node:
    """A new node that belongs to the module of another."""
    node = graph.call_function(target, args, kwargs or {})  # type: ignore[arg-type]
    node.meta = {name: like.meta[name] for name in ("nn_module_stack",) if name in like.meta}
    return node
