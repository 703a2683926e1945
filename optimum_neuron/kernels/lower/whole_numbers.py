# SPDX-License-Identifier: Apache-2.0
"""Whole numbers of 64 bits become ones of 32, which kernels take, where they are known to fit: numbers of experts, groups and places."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from .builder import arguments
from .choose import BY_NUMBER, LARGEST, finds_largest, takes_rows
from .pointwise import ALIASES, COMPARISONS, CONVERSIONS, COPIES, JOINING, REMAINDERS, VIEWS, aten, find_divisor


_Range = tuple[int, int]
_RANGES: dict[torch.dtype, _Range] = {torch.int32: (-(2**31), 2**31 - 1), torch.bool: (0, 1)}
# Tokens, places, slots, blocks and experts: of what a step takes, and of tables that a model keeps.
_INPUTS = (-(2**30), 2**30)
_LOOKUPS = frozenset((aten.embedding.default, aten.index_select.default, aten.index.Tensor))
_KEEPING = VIEWS | ALIASES | COPIES | _LOOKUPS | {aten.contiguous.default, aten.gather.default}
_CHOICES = frozenset((aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar))
_COUNTS = frozenset((aten.arange.default, aten.arange.start))
_CLAMPS = frozenset((aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default))
_OF_TWO: dict[Any, Callable[[int, int], int]] = {
    aten.add.Tensor: operator.add,
    aten.add.Scalar: operator.add,
    aten.sub.Tensor: operator.sub,
    aten.sub.Scalar: operator.sub,
    aten.mul.Tensor: operator.mul,
    aten.mul.Scalar: operator.mul,
    aten.minimum.default: min,
    aten.maximum.default: max,
}
# What takes them, and has results of which no element is one of them; or no effect.
_TAKING = frozenset(
    (
        aten._assert_tensor_metadata.default,
        *_LOOKUPS,
        *COMPARISONS,
        *CONVERSIONS,
    )
)


def narrow_whole_numbers(program: ExportedProgram) -> None:
    """Make int64 results int32 where their numbers fit, and nothing that reads them asks for more."""
    nodes = [node for node in program.graph_module.graph.nodes if node.op == "call_function"]
    inputs, buffers = program.graph_signature.user_inputs, program.graph_signature.inputs_to_buffers
    ranges: dict[Node, _Range] = {}
    for node in program.graph_module.graph.nodes:
        is_input = node.name in inputs and _has_type(node, torch.int32)
        if is_input or (node.name in buffers and _has_type(node, torch.int64)):
            ranges[node] = _INPUTS
    for node in nodes:
        if (_has_type(node, torch.int64) or _has_type(node, torch.int32)) and (found := _find_range(node, ranges)):
            ranges[node] = found
    ranges = {node: found for node in nodes if _has_type(node, torch.int64) and (found := ranges.get(node))}
    while refused := [node for node in ranges if not _can_be_narrow(node, ranges)]:
        for node in refused:
            del ranges[node]
    for node in ranges:
        node.meta["val"] = node.meta["val"].to(torch.int32)
    for node in nodes:
        if finds_largest(node) and all(user in ranges for user in node.users if arguments(user)[1] == 1):
            values, columns = node.meta["val"]
            node.meta["val"] = (values, columns.to(torch.int32))


def _has_type(node: Node, dtype: torch.dtype) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype == dtype


def _find_range(node: Node, ranges: dict[Node, _Range]) -> _Range | None:
    """Return the least and the largest number that a node's result can have; None where they are not known to fit."""

    def range_of(source: Any) -> _Range | None:
        if isinstance(source, Node):
            return ranges.get(source, _RANGES.get(source.meta["val"].dtype))
        return (source, source) if isinstance(source, int) else None

    target, operands = node.target, arguments(node)
    if target is operator.getitem:
        source, number = operands
        if source.target in LARGEST:
            columns = arguments(source)[0].meta["val"].shape[-1]
            return (0, columns - 1) if number == 1 and finds_largest(source) else None
        return range_of(arguments(source)[0]) if source.target in VIEWS else None
    if target in CONVERSIONS or target in _KEEPING:
        return range_of(operands[0])
    if target in JOINING:
        return _unite(map(range_of, operands[0]))
    if target in _CHOICES:
        return _unite(map(range_of, operands[1:3]))
    if target in _COUNTS:
        begin = operands[0] if target is aten.arange.start else 0
        return _unite([(begin, begin + len(node.meta["val"]))]) if isinstance(begin, int) else None
    if (divisor := find_divisor(node)) is not None and (found := range_of(operands[0])) is not None:
        return (0, divisor - 1) if target in REMAINDERS else (found[0] // divisor, found[1] // divisor)
    if target in _CLAMPS:
        return _unite(range_of(each) for each in operands if each is not None)
    if target in _OF_TWO and not node.kwargs:
        first, second = range_of(operands[0]), range_of(operands[1])
        if first is not None and second is not None:
            ends = [_OF_TWO[target](a, b) for a in first for b in second]
            return _unite([(min(ends), max(ends))])
    return None


def _unite(found: Iterable[_Range | None]) -> _Range | None:
    """Return the range of all numbers; None where one is not known, or they do not fit."""
    ranges = list(found)
    if None in ranges:
        return None
    least, largest = min(each[0] for each in ranges if each), max(each[1] for each in ranges if each)
    first, last = _RANGES[torch.int32]
    return (least, largest) if first <= least and largest <= last else None


def _can_be_narrow(node: Node, ranges: dict[Node, _Range]) -> bool:
    """Return whether all that reads a node takes int32, and its own operator gives int32 where its operands have it."""
    taken = arguments(node)[:1] if node.target in _LOOKUPS else node.all_input_nodes
    sources = [source for source in taken if _has_type(source, torch.int64)]
    if node.target not in CONVERSIONS and not all(source in ranges for source in sources):
        return False
    return all(user in ranges or _takes_number(user, node) for user in node.users)


def _takes_number(user: Node, node: Node) -> bool:
    if user.target in BY_NUMBER:
        return arguments(user)[2] is node and takes_rows(user)
    return user.target in _TAKING and not (user.target in _LOOKUPS and arguments(user)[0] is node)
