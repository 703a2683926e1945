# SPDX-License-Identifier: Apache-2.0
"""Products of a matrix of tokens and a matrix of weights per head, as a linear layer per head: for these there are kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Graph, Node

from .builder import arguments
from .pointwise import aten


def split_heads(program: ExportedProgram) -> None:
    """Replaces `baddbmm` of a bias `[heads, 1, outputs]`, tokens `[heads, tokens, inputs]` and a parameter `[heads, inputs, outputs]`."""
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
    """`[heads, tokens, outputs]`, of which a token's elements lie side by side."""
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
