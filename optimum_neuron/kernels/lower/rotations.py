# SPDX-License-Identifier: Apache-2.0
"""The rotation of half of each row, by which models encode positions: one operator of a Map in place of parts that are written apart."""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from .builder import PlanBuilder, arguments
from .fusion import is_float
from .join import Join
from .pointwise import ROTATE_HALF, aten


def find_rotations(program: ExportedProgram) -> None:
    """Replaces `cat([-x[..., half:], x[..., :half]], -1)`, of an x with twice as many columns."""
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        source = _rotated(node)
        if source is not None:
            node.target, node.args, node.kwargs = ROTATE_HALF, (source,), {}


def _rotated(node: Node) -> Node | None:
    """What a node rotates; None where it does something else."""
    if node.target is not aten.cat.default or len(node.args) != 2 or len(arguments(node)[0]) != 2:
        return None
    (negated, first), dim = arguments(node)
    fake: torch.Tensor = node.meta["val"]
    if negated.target is not aten.neg.default or dim not in (-1, fake.dim() - 1) or not is_float(fake.dtype):
        return None
    second = arguments(negated)[0]
    columns = fake.shape[-1]
    source = _part(first, 0, columns // 2)
    if source is None or source is not _part(second, columns // 2, columns):
        return None
    return source if columns == 2 * (columns // 2) == source.meta["val"].shape[-1] else None


def _part(node: Any, begin: int, end: int) -> Node | None:
    """What a node takes such columns of."""
    if node.target is not aten.slice.Tensor or len(node.args) != 4 or node.kwargs:
        return None
    source, dim, *bounds = arguments(node)
    columns = source.meta["val"].shape[-1]
    is_last = dim in (-1, source.meta["val"].dim() - 1)
    return source if is_last and [bounds[0], min(bounds[1], columns)] == [begin, end] else None


def lower_rotation(builder: PlanBuilder, node: Node) -> bool:
    join = Join(builder, node, [source := arguments(node)[0]], inner=1)
    return join.finish(join.group.rotate(join.register(source)), rows=False)
