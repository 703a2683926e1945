# SPDX-License-Identifier: Apache-2.0
"""Rewrites of a program before it is lowered: rotations as one operator, and results in place of writes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.node import map_arg

from .builder import PlanBuilder, arguments
from .fusion import FLOATS
from .join import Join
from .pointwise import ALIASES, CONVERSIONS, ROTATE_HALF, VIEWS, aten
from .spell_out import add_call


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
    """Replace an operator that writes to a tensor by the one that returns its result, if it is `known`, and a copy where others see it."""
    graph = program.graph_module.graph
    order = {node: number for number, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        plain = _find_plain(node.target)
        if plain not in known or not isinstance(target := arguments(node)[0], Node):
            continue
        own, value = target.meta["val"], _compute_on_meta(plain, node)
        if (own.dtype, own.shape) != (value.dtype, value.shape):
            continue
        alone = _is_alone(target, order, node)
        with graph.inserting_before(node):
            result = graph.call_function(plain, node.args, dict(node.kwargs))
            result.meta["val"] = value
            written = result if alone else add_call(graph, aten.copy_.default, target, result)
        order[result] = order[written] = order[node]
        node.replace_all_uses_with(written)
        for user in [each for each in target.users if alone and order[each] > order[node]]:
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
