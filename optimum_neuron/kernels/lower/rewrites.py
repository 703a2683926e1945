# SPDX-License-Identifier: Apache-2.0
"""Rewrites of a program before it is lowered: products per head as linear layers, and rotations as one operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Graph, Node

from .builder import PlanBuilder, arguments
from .fusion import FLOATS
from .join import Join
from .pointwise import ROTATE_HALF, aten


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
