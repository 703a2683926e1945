# SPDX-License-Identifier: Apache-2.0
"""Rewrites of a program before it is lowered: products with weights as linear layers, rotations as one operator, results in place of writes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from .builder import PlanBuilder, arguments
from .fusion import FLOATS
from .join import Join
from .pointwise import ALIASES, CONVERSIONS, ROTATE_HALF, VIEWS, aten


def split_heads(program: ExportedProgram) -> None:
    """Replace `baddbmm` of a bias `[heads, 1, outputs]`, tokens `[heads, tokens, inputs]` and a parameter `[heads, inputs, outputs]`."""
    specs = program.graph_signature.input_specs
    parameters = {spec.arg.name for spec in specs if spec.kind is InputKind.PARAMETER}
    graph = program.graph_module.graph
    columns: dict[tuple[Node, int], Node] = {}
    for node in list(graph.nodes):
        if node.target is not aten.baddbmm.default or node.kwargs or len(node.args) != 3:
            continue
        bias, x, weight = arguments(node)
        heads, _, outputs = weight.meta["val"].shape
        if weight.name not in parameters or tuple(bias.meta["val"].shape) != (heads, 1, outputs):
            continue
        with graph.inserting_before(node):
            result = _split(graph, bias, x, weight, columns)
        node.replace_all_uses_with(result)
        graph.erase_node(node)


def find_layers(program: ExportedProgram, most: int) -> None:
    """Replace products with a parameter `[inputs, outputs]` by linear layers, of weights that lie so, or have at most so many elements."""
    specs = program.graph_signature.input_specs
    parameters = {spec.arg.name for spec in specs if spec.kind is InputKind.PARAMETER}
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        if node.target not in _PRODUCTS or node.kwargs:
            continue
        *bias, x, weight = arguments(node)
        base, fake = weight, weight.meta["val"]
        while base.target in VIEWS:
            base = arguments(base)[0]
        lies_so = fake.dim() == 2 and fake.t().is_contiguous()
        fits = lies_so or (fake.dim() == 2 and fake.numel() <= most)
        if (
            base.name not in parameters
            or not fits
            or x.meta["val"].dim() < 2
            or any(each.meta["val"].dim() != 1 for each in bias)
        ):
            continue
        with graph.inserting_before(node):
            turned = _call(graph, aten.contiguous.default, _call(graph, aten.t.default, weight))
            result = _call(graph, aten.linear.default, x, turned, *bias)
        node.replace_all_uses_with(result)
        graph.erase_node(node)


def spell_out_attention(program: ExportedProgram) -> None:
    """Replace attention that no kernel of ours takes by two products with a softmax between them."""
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        if (
            node.target is not aten.scaled_dot_product_attention.default
            or len(node.args) != 4
            or "scale" not in node.kwargs
        ):
            continue
        query, keys, values, bias = arguments(node)
        if node.kwargs.keys() != {"scale"} or bias.meta["val"].dtype not in FLOATS:
            continue
        # Finite: a row that sees nothing is no NaN.
        lowest = torch.finfo(bias.meta["val"].dtype).min
        with graph.inserting_before(node):
            scores = _call(graph, aten.matmul.default, query, _call(graph, aten.transpose.int, keys, -1, -2))
            scaled = _call(graph, aten.mul.Tensor, scores, node.kwargs["scale"])
            masked = _call(graph, aten.add.Tensor, scaled, _call(graph, aten.clamp_min.default, bias, lowest))
            result = _call(graph, aten.matmul.default, _call(graph, aten.softmax.int, masked, -1), values)
        node.replace_all_uses_with(result)
        graph.erase_node(node)


_PRODUCTS = (aten.matmul.default, aten.mm.default, aten.addmm.default)


def _split(graph: Graph, bias: Node, x: Node, weight: Node, columns: dict[tuple[Node, int], Node]) -> Node:
    """Return `[heads, tokens, outputs]`, with adjacent elements of a token."""
    turned = _call(graph, aten.contiguous.default, _call(graph, aten.transpose.int, weight, 1, 2))
    found = []
    for head in range(weight.meta["val"].shape[0]):
        if (x, head) not in columns:  # products of the same tokens are one step
            columns[x, head] = _call(graph, aten.select.int, x, 0, head)
        own = _call(graph, aten.select.int, _call(graph, aten.select.int, bias, 0, head), 0, 0)
        layer = _call(graph, aten.select.int, turned, 0, head)
        found.append(_call(graph, aten.linear.default, columns[x, head], layer, own))
    return _call(graph, aten.transpose.int, _call(graph, aten.stack.default, found, 1), 0, 1)


def _call(graph: Graph, operator: Callable[..., Any], *args: Any) -> Node:
    node = graph.call_function(operator, args)
    values = [each.meta["val"] if isinstance(each, Node) else each for each in args]
    if isinstance(args[0], list):
        values[0] = [each.meta["val"] for each in args[0]]
    node.meta["val"] = operator(*values)
    return node


def find_rotations(program: ExportedProgram) -> None:
    """Replace `cat([-x[..., half:], x[..., :half]], -1)`, of an x with twice as many columns."""
    for node in list(program.graph_module.graph.nodes):
        source = _rotated(node)
        if source is not None:
            node.target, node.args, node.kwargs = ROTATE_HALF, (source,), {}


def _rotated(node: Node) -> Node | None:
    """Return the operand that a node rotates; None where it does something else."""
    if node.target is not aten.cat.default or len(node.args) != 2 or len(arguments(node)[0]) != 2:
        return None
    (negated, first), dim = arguments(node)
    fake: torch.Tensor = node.meta["val"]
    if negated.target is not aten.neg.default or dim not in (-1, fake.dim() - 1) or fake.dtype not in FLOATS:
        return None
    second = arguments(negated)[0]
    columns = fake.shape[-1]
    source = _part(first, 0, columns // 2)
    if source is None or source is not _part(second, columns // 2, columns):
        return None
    return source if columns == 2 * (columns // 2) == source.meta["val"].shape[-1] else None


def _part(node: Any, begin: int, end: int) -> Node | None:
    """Return the operand that a node takes these columns of; None where it does something else."""
    if node.target is not aten.slice.Tensor or len(node.args) != 4 or node.kwargs:
        return None
    source, dim, *bounds = arguments(node)
    columns = source.meta["val"].shape[-1]
    is_last = dim in (-1, source.meta["val"].dim() - 1)
    return source if is_last and [bounds[0], min(bounds[1], columns)] == [begin, end] else None


def lower_rotation(builder: PlanBuilder, node: Node) -> bool:
    join = Join(builder, node, [source := arguments(node)[0]], inner=1)
    return join.finish(join.group.rotate(join.register(source)), rows=False)


# What may be its first operand itself.
_SHARING = VIEWS | ALIASES | {aten.contiguous.default}


def drop_writes(program: ExportedProgram, known: Collection[Any]) -> None:
    """Replace an operator that writes to a tensor of the graph's own by the one that returns its result, if it is `known`."""
    graph = program.graph_module.graph
    order = {node: number for number, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        plain = _find_plain(node.target)
        if plain not in known or not isinstance(target := arguments(node)[0], Node):
            continue
        own, value = target.meta["val"], _compute_on_meta(plain, node)
        if (own.dtype, own.shape) != (value.dtype, value.shape) or not _is_alone(target, order, node):
            continue
        with graph.inserting_before(node):
            result = graph.call_function(plain, node.args, dict(node.kwargs))
        result.meta["val"], order[result] = value, order[node]
        node.replace_all_uses_with(result)
        for user in [each for each in target.users if order[each] > order[node]]:
            user.replace_input_with(target, result)
        graph.erase_node(node)


def _find_plain(target: Any) -> Any:
    """Return the operator that returns what `target` writes to its first operand; None where there is none."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or not target._schema.is_mutable:
        return None
    name = target._schema.name.removeprefix("aten::").removesuffix("_")
    return getattr(getattr(aten, name, None), target._overloadname, None)


def _compute_on_meta(operator: Callable[..., torch.Tensor], node: Node) -> torch.Tensor:
    args, kwargs = map_arg((arguments(node), node.kwargs), lambda source: source.meta["val"].to("meta"))
    return operator(*args, **kwargs)


def _is_alone(target: Node, order: dict[Node, int], writer: Node) -> bool:
    """Return whether no other value shares a tensor's memory when it is written to."""
    if target.op != "call_function" or _shares_memory(target):
        return False
    return not any(_shares_memory(user) for user in target.users if order[user] < order[writer])


def _shares_memory(node: Node) -> bool:
    """Return whether a node's result may lie in the memory of its first operand."""
    if node.target is operator.getitem:
        return arguments(node)[0].target in VIEWS
    if node.target in CONVERSIONS:
        return bool(node.meta["val"].dtype == arguments(node)[0].meta["val"].dtype)
    mutable = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
    return mutable or node.target in _SHARING
