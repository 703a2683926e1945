# SPDX-License-Identifier: Apache-2.0
"""Calls of torch whose results have a row per row of an operand, which depends on that row alone."""

from __future__ import annotations

from .program import Operand, TorchCall


# Operator: the operands with such rows, and the argument that names the dimension along which elements meet (None: the last).
_CALLS: dict[str, tuple[tuple[int, ...], int | None]] = {
    "aten.cumsum.default": ((0,), 1),
    "aten.gather.default": ((0, 2), 1),
    "aten.matmul.default": ((0,), None),
    "aten.mm.default": ((0,), None),
    "aten.scatter.src": ((0, 2, 3), 1),
    "aten.scatter.value": ((0, 2), 1),
    "aten.softmax.int": ((0,), 1),
    "aten.sort.default": ((0,), 1),
    "aten.topk.default": ((0,), 2),
}
# Of these the bits of a row depend on how many there are: rows of any are computed always.
_COMPUTED_WHOLE = frozenset(["aten.matmul.default", "aten.mm.default"])


def can_end_early(call: TorchCall) -> bool:
    """Whether a call of fewer rows gives those the same bits."""
    return call.operator not in _COMPUTED_WHOLE


def row_operands(call: TorchCall, dim: int) -> list[Operand]:
    """The operands of a call of which rows along `dim` can be left out with those of its results; none where they cannot."""
    known = _CALLS.get(call.operator)
    outputs = [each for each in call.outputs if each is not None]
    if known is None or not outputs:
        return []
    operands = [_tensor(call.arguments[place]) for place in known[0] if place < len(call.arguments)]
    found = [each for each in operands if each is not None]
    rank, rows = len(outputs[0].shape), outputs[0].shape[dim]
    same = all(len(each.shape) == rank and each.shape[dim] == rows for each in (*outputs, *found))
    if not same or len(found) < len(known[0]) or _meets(call, known[1]) % rank == dim:
        return []
    return found


def _tensor(argument: object) -> Operand | None:
    return argument.get("tensor") if isinstance(argument, dict) else None


def _meets(call: TorchCall, place: int | None) -> int:
    """The dimension along which elements meet; the last, where a call names none."""
    if place is None or place >= len(call.arguments):
        return int(call.keywords.get("dim", -1)) if place is not None else -1
    return int(call.arguments[place])
