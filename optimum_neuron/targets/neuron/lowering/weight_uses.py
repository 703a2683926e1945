# SPDX-License-Identifier: Apache-2.0
"""Has graphs take weights as products want them: no weight is transposed, and layers that read one tensor are one product.

It looks at a graph alone, not at the model's classes: a weight whose dimensions a graph puts in another order, be it by a
linear layer, is stored in that order; weights of several linear layers that read the very same tensor are stored side by
side. A weight that is also read as it is, such as an embedding that is tied to the head, is stored in both forms.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from ..weight_layout import StoredWeight, WeightLayout
from .quantized_uses import call_like, quantized_groups, replaced_tensors, stored_tensors


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
        """The node that reads the weight itself."""
        return self.node if self.cast is None else self.cast

    @property
    def x(self) -> Node | None:
        """What a linear layer reads."""
        return self.node.args[0] if self.node.target == LINEAR else None  # type: ignore[return-value]


def weight_layout(program: ExportedProgram) -> WeightLayout:
    """How the weights of a program are stored, which is decomposed but for linear layers."""
    weights = _weights(program)
    uses, quantized = _find_uses(program.graph, weights), quantized_groups(program.graph, weights)
    stored = dict.fromkeys(_stored(group, weights) for group in _groups(uses)) | stored_tensors(quantized)
    return WeightLayout(
        tuple(stored), frozenset(weights[node] for node in _replaced(uses) | replaced_tensors(quantized))
    )


def use_stored_weights(program: ExportedProgram) -> tuple[dict[Node, str], set[Node]]:
    """Changes a program's graph, in place, to take its weights as `weight_layout` has them.

    Returns:
        New placeholders behind all others, with the names of what is stored; and placeholders that have no user left.
    """
    graph, weights = program.graph, _weights(program)
    uses, quantized = _find_uses(graph, weights), quantized_groups(graph, weights)
    left = _replaced(uses) | replaced_tensors(quantized)
    placeholders: dict[StoredWeight, Node] = {}
    last = next(node for node in reversed(graph.nodes) if node.op == "placeholder")
    for group in _groups(uses):
        stored = _stored(group, weights)
        if stored not in placeholders:
            last = placeholders[stored] = _placeholder(graph, last, stored, [use.weight for use in group])
        _rewrite(graph, group, placeholders[stored])
    for stored, parts in stored_tensors(quantized).items():
        last = placeholders[stored] = _placeholder(graph, last, stored, parts)
    for each in quantized:
        each.rewrite(graph, placeholders)
    graph.eliminate_dead_code()
    return {node: stored.name for stored, node in placeholders.items()}, left


def _weights(program: ExportedProgram) -> dict[Node, str]:
    """The model's own tensors, by placeholder."""
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


def _groups(uses: Iterable[_Use]) -> list[list[_Use]]:
    """Uses that become one, in the order of the first of each."""
    of_weight: dict[Node, list[_Use]] = defaultdict(list)
    for use in uses:
        of_weight[use.weight].append(use)
    groups: dict[Any, list[_Use]] = defaultdict(list)
    for use in uses:
        alone = use.x is None or use.cast is not None or len(of_weight[use.weight]) > 1
        groups[use.node if alone else (use.x, use.weight.meta["val"].dtype)].append(use)
    return list(groups.values())


def _stored(group: list[_Use], weights: Mapping[Node, str]) -> StoredWeight:
    return StoredWeight(tuple(weights[use.weight] for use in group), group[0].order)


def _replaced(uses: Iterable[_Use]) -> set[Node]:
    """Weights that nothing reads but these uses."""
    nodes: dict[Node, set[Node]] = defaultdict(set)
    for use in uses:
        nodes[use.weight] |= {use.node, use.reader}
    casts = {use.cast for use in uses if use.cast is not None}
    return {
        weight for weight, own in nodes.items() if all(_users(reader) <= own for reader in (weight, *(own & casts)))
    }


def _users(node: Node) -> set[Node]:
    return {user for user in node.users if user.target != _ASSERT}


def _placeholder(graph: Graph, last: Node, stored: StoredWeight, parts: list[Node]) -> Node:
    shapes = {name: tuple(part.meta["val"].shape) for name, part in zip(stored.parts, parts, strict=True)}
    with graph.inserting_after(last):
        node = graph.placeholder(f"w_{stored.name}".replace(".", "_").replace("-", "_"))
    node.meta["val"] = torch.empty(stored.shape(shapes.__getitem__), dtype=parts[0].meta["val"].dtype, device="meta")
    return node


def _rewrite(graph: Graph, group: list[_Use], stored: Node) -> None:
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
