# SPDX-License-Identifier: Apache-2.0
"""Rewrites an exported step graph for the CPU: linear layers become calls of the own kernel, or get rows that are computed alike."""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from .kernels import DTYPES, namespace


# Where several threads share a few rows, torch's matrix product sums some rows in another order than others, unless their
# number is a multiple of 4: then a token's result would depend on its place in the step.
ROW_MULTIPLE = 4


def use_linear_kernel(program: ExportedProgram) -> None:
    """Replaces `aten.linear` in place. Layers that share their input (q, k, v; gate, up) become one call."""
    graph = program.graph_module.graph
    kernel = getattr(torch.ops, namespace()).linears.default
    groups: dict[tuple[Node, Node | None], list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.op == "call_function" and node.target is torch.ops.aten.linear.default and _fits(node):
            x, *parameters = _operands(node)
            converted = any(parameter is not None and parameter.op != "placeholder" for parameter in parameters)
            groups[x, node if converted else None].append(node)
    for group in groups.values():
        x = _operands(group[0])[0]  # by now, what a rewritten layer left in its place
        weights, biases = zip(*(_operands(node)[1:] for node in group), strict=True)
        # Where layers share a call, weights are placeholders: where the first one stands, all operands are there.
        with graph.inserting_before(group[0]):
            call = graph.call_function(kernel, (x, list(weights), list(biases)))
            outputs = [graph.call_function(operator.getitem, (call, index)) for index in range(len(group))]
        call.meta["val"] = [node.meta["val"] for node in group]
        for node, output in zip(group, outputs, strict=True):
            output.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(output)
            graph.erase_node(node)
    program.graph_module.recompile()


def _fits(node: Node) -> bool:
    x, *parameters = _operands(node)
    if not all(parameter is None or _is_parameter(parameter) for parameter in parameters):
        return False
    # Whatever the number of rows: a token is to get the same bits in graphs of all sizes.
    value, weight = x.meta["val"], parameters[0].meta["val"]
    return value.dtype == weight.dtype and value.dtype in DTYPES


def _is_parameter(node: Node) -> bool:
    """Whether a node is a parameter, or one in another type, as the weights of routers that run in float32."""
    if node.target is torch.ops.aten.to.dtype:
        node = node.args[0]  # type: ignore[assignment]
    return node.op == "placeholder"


def _operands(node: Node) -> Any:
    """Input, weight and bias (None without) of a linear layer's node."""
    x, weight, *bias = node.args
    return x, weight, bias[0] if bias else None


def pad_linear_rows(program: ExportedProgram) -> None:
    """Gives every `aten.linear` a multiple of `ROW_MULTIPLE` rows, in place; one row alone has no other to differ from."""
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not torch.ops.aten.linear.default:
            continue
        x, *parameters = _operands(node)
        rows = x.meta["val"].shape[-2] if x.meta["val"].dim() > 1 else 1
        if rows == 1 or rows % ROW_MULTIPLE == 0:
            continue
        with graph.inserting_before(node):
            padding = [0, 0, 0, -rows % ROW_MULTIPLE]
            padded = graph.call_function(torch.ops.aten.constant_pad_nd.default, (x, padding))
            output = graph.call_function(torch.ops.aten.linear.default, (padded, *parameters))
            kept = graph.call_function(torch.ops.aten.slice.Tensor, (output, -2, 0, rows))
        for new in (padded, output, kept):
            arguments = torch.fx.node.map_arg(new.args, lambda argument: argument.meta["val"])
            new.meta["val"] = new.target(*arguments)
        node.replace_all_uses_with(kept)
        graph.erase_node(node)
    program.graph_module.recompile()
