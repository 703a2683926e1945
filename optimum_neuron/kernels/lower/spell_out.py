# SPDX-License-Identifier: Apache-2.0
"""Operators that no kernel has, written as ones that kernels have: products with weights become linear layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Graph, Node

from .builder import arguments, option
from .fusion import FLOATS
from .pointwise import ALIASES, CONVERSIONS, COPIES, VIEWS, aten


# What is computed once is kept in memory: not what is as large as a weight matrix.
MAX_KEPT = 1 << 24  # elements
_T = TypeVar("_T")
# The real and the imaginary part of a complex tensor.
_Pair = tuple[Node, Node]
_PRODUCTS = (aten.mul.Tensor, aten.mul.Scalar)
_MOVES = VIEWS | ALIASES | COPIES | {aten.contiguous.default}


def add_call(graph: Graph, operator: Callable[..., Any], *args: Any) -> Node:
    """Add a call of an operator, with the shape and type of its result."""
    node = graph.call_function(operator, args)
    values = [each.meta["val"] if isinstance(each, Node) else each for each in args]
    if isinstance(args[0], list):
        values[0] = [each.meta["val"] for each in args[0]]
    node.meta["val"] = operator(*values)
    return node


def spell_out(program: ExportedProgram) -> None:
    """Replace what has a form by other operators, and complex numbers by pairs of real ones; the rest stays as it is."""
    graph = program.graph_module.graph
    specs = program.graph_signature.input_specs
    parameters = {spec.arg.name for spec in specs if spec.kind is InputKind.PARAMETER}
    pairs: dict[Node, _Pair] = {}
    for node in [each for each in graph.nodes if each.op == "call_function"]:
        result = None
        with graph.inserting_before(node):
            if node.target in _FORMS:
                result = _FORMS[node.target](graph, node)
            elif node.target in _LAYERS:
                result = _LAYERS[node.target](graph, node, parameters)
            elif node.target is aten.view_as_real.default and arguments(node)[0] in pairs:
                result = add_call(graph, aten.stack.default, list(pairs[arguments(node)[0]]), -1)
            elif (pair := _find_pair(graph, node, pairs)) is not None:
                pairs[node] = pair
        if result is not None:
            node.replace_all_uses_with(result)
            graph.erase_node(node)


def _write_layer(graph: Graph, node: Node, parameters: Collection[str]) -> Node | None:
    """Write a product with a parameter `[inputs, outputs]` that lies as of a linear layer, or is small, as such a layer."""
    if node.kwargs:
        return None
    *bias, x, weight = arguments(node)
    base, fake = weight, weight.meta["val"]
    while base.target in VIEWS:
        base = arguments(base)[0]
    fits = fake.dim() == 2 and (fake.t().is_contiguous() or fake.numel() <= MAX_KEPT)
    plain = x.meta["val"].dim() > 1 and all(each.meta["val"].dim() == 1 for each in bias)
    if base.name not in parameters or not fits or not plain:
        return None
    turned = add_call(graph, aten.contiguous.default, add_call(graph, aten.t.default, weight))
    return add_call(graph, aten.linear.default, x, turned, *bias)


def _write_products(graph: Graph, node: Node, parameters: Collection[str]) -> Node:
    """Write `baddbmm`, of a parameter as a linear layer for each head; a bias of zeros has no effect."""
    bias, x, y = arguments(node)
    heads, _, outputs = y.meta["val"].shape
    if not node.kwargs and y.name in parameters and tuple(bias.meta["val"].shape) == (heads, 1, outputs):
        return _split_heads(graph, bias, x, y)
    result = add_call(graph, aten.bmm.default, x, y)
    alpha, beta = node.kwargs.get("alpha", 1), node.kwargs.get("beta", 1)
    if alpha != 1:
        result = add_call(graph, aten.mul.Tensor, result, alpha)
    if beta == 0 or (bias.target is aten.zeros.default and len(bias.users) == 1):
        return result
    return add_call(graph, aten.add.Tensor, result, add_call(graph, aten.mul.Tensor, bias, beta))


def _split_heads(graph: Graph, bias: Node, x: Node, weight: Node) -> Node:
    """Return `[heads, tokens, outputs]`, with adjacent elements of a token."""
    turned = add_call(graph, aten.contiguous.default, add_call(graph, aten.transpose.int, weight, 1, 2))
    columns = {user.meta["head"]: user for user in x.users if "head" in user.meta}
    found = []
    for head in range(weight.meta["val"].shape[0]):
        if head not in columns:  # products of the same tokens are one step
            columns[head] = add_call(graph, aten.select.int, x, 0, head)
            columns[head].meta["head"] = head
        own = add_call(graph, aten.select.int, add_call(graph, aten.select.int, bias, 0, head), 0, 0)
        layer = add_call(graph, aten.select.int, turned, 0, head)
        found.append(add_call(graph, aten.linear.default, columns[head], layer, own))
    return add_call(graph, aten.transpose.int, add_call(graph, aten.stack.default, found, 1), 0, 1)


def _write_attention(graph: Graph, node: Node) -> Node | None:
    """Write attention that no kernel of ours takes as two products with a softmax between them."""
    if len(node.args) != 4 or node.kwargs.keys() != {"scale"} or arguments(node)[3].meta["val"].dtype not in FLOATS:
        return None
    query, keys, values, bias = arguments(node)
    # Finite: a row that sees nothing is no NaN.
    lowest = torch.finfo(bias.meta["val"].dtype).min
    scores = add_call(graph, aten.matmul.default, query, add_call(graph, aten.transpose.int, keys, -1, -2))
    scaled = add_call(graph, aten.mul.Tensor, scores, node.kwargs["scale"])
    masked = add_call(graph, aten.add.Tensor, scaled, add_call(graph, aten.clamp_min.default, bias, lowest))
    return add_call(graph, aten.matmul.default, add_call(graph, aten.softmax.int, masked, -1), values)


def _write_deviation(graph: Graph, node: Node) -> Node:
    x, dims = arguments(node)[0], option(node, 1, "dim")
    unbiased, keepdim = option(node, 2, "unbiased", True), option(node, 3, "keepdim", False)
    shape = x.meta["val"].shape
    count = math.prod(shape[dim] for dim in dims or range(len(shape)))
    apart = add_call(graph, aten.sub.Tensor, x, add_call(graph, aten.mean.dim, x, dims, True))
    total = add_call(graph, aten.sum.dim_IntList, add_call(graph, aten.mul.Tensor, apart, apart), dims, keepdim)
    return add_call(graph, aten.sqrt.default, add_call(graph, aten.div.Tensor, total, count - bool(unbiased)))


def _write_padding(graph: Graph, node: Node) -> Node | None:
    """Write `pad` by a number as parts that are joined; return None for other modes, and where it takes elements away."""
    result, sizes = arguments(node)[:2]
    if option(node, 2, "mode", "constant") != "constant" or min(sizes) < 0:
        return None
    number = option(node, 3, "value") or 0
    for dim, (before, after) in enumerate(zip(sizes[::2], sizes[1::2], strict=True), 1):
        parts = [_fill(graph, result, -dim, before, number), result, _fill(graph, result, -dim, after, number)]
        result = add_call(graph, aten.cat.default, [each for each in parts if each.meta["val"].shape[-dim]], -dim)
    return result


def _fill(graph: Graph, x: Node, dim: int, size: int, number: float) -> Node:
    shape = list(x.meta["val"].shape)
    shape[dim] = size
    return add_call(graph, aten.new_full.default, x, shape, number)


def _write_softmax(graph: Graph, node: Node) -> Node | None:
    """Write a softmax over another dimension than the last as one over the last."""
    x, dim, dtype = arguments(node)[0], arguments(node)[1], option(node, 2, "dtype")
    if dim in (-1, x.meta["val"].dim() - 1):
        return None
    turned = add_call(graph, aten.softmax.int, add_call(graph, aten.transpose.int, x, dim, -1), -1, dtype)
    return add_call(graph, aten.transpose.int, turned, dim, -1)


def _find_pair(graph: Graph, node: Node, pairs: Mapping[Node, _Pair]) -> _Pair | None:
    """Return the parts of a complex result; None where they are not known."""
    target: Any = node.target
    if target is aten.view_as_complex.default:
        return _of_both((0, 1), lambda part: add_call(graph, aten.select.int, arguments(node)[0], -1, part))
    if target is aten.polar.default:
        size, angle = arguments(node)
        parts = (aten.cos.default, aten.sin.default)
        return _of_both(parts, lambda part: add_call(graph, aten.mul.Tensor, size, add_call(graph, part, angle)))
    if not any(source in pairs for source in node.all_input_nodes):
        return None
    first, *others = arguments(node)
    if target in _PRODUCTS:
        return _multiply(graph, pairs.get(first, first), pairs.get(others[0], others[0]))
    if target in CONVERSIONS and node.meta["val"].dtype == first.meta["val"].dtype:
        return pairs[first]
    if target in _MOVES:
        return _of_both(pairs[first], lambda part: add_call(graph, target, part, *others))
    return None


def _multiply(graph: Graph, left: Any, right: Any) -> _Pair | None:
    """Return the product of two pairs, or of a pair and a real number or tensor."""
    if not isinstance(left, tuple):
        left, right = right, left

    def product(x: Node, y: Any) -> Node:
        return add_call(graph, aten.mul.Tensor, x, y)

    if isinstance(right, tuple):
        real = add_call(graph, aten.sub.Tensor, product(left[0], right[0]), product(left[1], right[1]))
        return real, add_call(graph, aten.add.Tensor, product(left[0], right[1]), product(left[1], right[0]))
    is_complex = right.meta["val"].is_complex() if isinstance(right, Node) else isinstance(right, complex)
    return None if is_complex else _of_both(left, lambda part: product(part, right))


def _of_both(parts: tuple[_T, _T], make: Callable[[_T], Node]) -> _Pair:
    return make(parts[0]), make(parts[1])


_FORMS: dict[Any, Callable[[Graph, Node], Node | None]] = {
    aten.scaled_dot_product_attention.default: _write_attention,
    aten.std.dim: _write_deviation,
    aten.pad.default: _write_padding,
    aten.softmax.int: _write_softmax,
}
# What depends on which operands are parameters.
_LAYERS: dict[Any, Callable[[Graph, Node, Collection[str]], Node | None]] = {
    aten.baddbmm.default: _write_products,
    **dict.fromkeys((aten.matmul.default, aten.mm.default, aten.addmm.default), _write_layer),
}
