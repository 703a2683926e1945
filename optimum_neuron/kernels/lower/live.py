# SPDX-License-Identifier: Apache-2.0
"""Steps that compute each token by itself leave out what follows the last live token of a run.

A short chunk ends in padding and idle rows are not live. Their results are not read, so long as each step on the
way takes a token's values from that token alone. So demand is followed backwards, from the outputs and the cache: of each
buffer, whether all of it is needed, or the part of live tokens, and how tokens lie in it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from ..plan import Plan
from ..steps.access import SIZES
from ..steps.effects import find_operands
from ..steps.steps import Buffer, Operand, Step, Tokens
from .token_forms import TokenForm, find_form


@dataclass(frozen=True)
class _Layout:
    """The layout of tokens in a buffer.

    Attributes:
        stride: bytes from a token to the next.
        count: tokens in a row of them, where there are several rows: a head's, say.
        base: the first one.
    """

    stride: int
    count: int | None
    base: int


class _Conflict:
    """A buffer that is needed whole."""


_WHOLE = _Conflict()
_Demand = _Layout | _Conflict


def leave_out_dead(plan: Plan, count: int, by_token: Collection[str]) -> Plan:
    """Return the plan with `tokens` at the steps that compute each token by itself.

    Args:
        count: the graph's tokens.
        by_token: the outputs that have a row per token; of the others all is needed.
    """
    if count < 2:
        return plan
    demands = _Demands(plan.buffers, count, by_token)
    steps = [demands.follow_step(step) for step in reversed(plan.steps)]
    return replace(plan, steps=tuple(steps[::-1]))


class _Demands:
    """The parts of buffers that the steps followed so far need."""

    def __init__(self, buffers: Sequence[Buffer], count: int, by_token: Collection[str]) -> None:
        self._buffers = buffers
        self._count = count
        self._of: dict[int, _Demand] = {}
        for index, buffer in enumerate(buffers):
            if buffer.kind == "output":
                each = buffer.bytes // count
                self._of[index] = _Layout(each, None, 0) if buffer.name in by_token and each else _WHOLE

    def follow_step(self, step: Step) -> Step:
        """Return a step with what it can leave out, and add what it needs to the demands."""
        form = find_form(step, self._count)
        tokens = None if form is None else self._find_tokens(form)
        live = [] if form is None else form.live
        if form is None or tokens is None:
            spared = [access for access, _ in live]
            self._need_all(each for each in find_operands(step) if each not in spared)
        else:
            self._need_all(form.whole)
            for access, dim in form.reads:
                self._need_part(access, _find_layout(access, dim, tokens.first))
            step = form.limit_step(tokens)
        for access, dim in live:
            self._need_part(access, _find_layout(access, dim, 0))
        return step

    def _find_tokens(self, form: TokenForm) -> Tokens | None:
        """Return the tokens that a step computes; None where they do not follow from the demands."""
        found: set[tuple[int, Tokens]] = set()
        for access, dims in form.writes:
            demand = self._of.get(access.buffer)
            if self._buffers[access.buffer].kind not in ("arena", "output") or isinstance(demand, _Conflict):
                return None
            if demand is not None:
                fitting = [(dim, tokens) for dim in dims if (tokens := _match_tokens(access, dim, demand)) is not None]
                if len(fitting) != 1:
                    return None
                found.add(fitting[0])
        if form.is_sink:
            access, dim = form.reads[0]
            if access.shape[dim] == self._count:
                found.add((0, Tokens(0, self._count)))
        if len(found) != 1:
            return None
        dim, tokens = found.pop()
        return tokens if form.choose_dim(dim) else None

    def _need_part(self, access: Operand, layout: _Layout | None) -> None:
        known = self._of.get(access.buffer)
        if layout is None or known not in (None, layout):
            self._of[access.buffer] = _WHOLE
        else:
            self._of[access.buffer] = layout

    def _need_all(self, operands: Iterable[Operand]) -> None:
        for each in operands:
            self._of[each.buffer] = _WHOLE


def _find_layout(access: Operand, dim: int, first: int) -> _Layout | None:
    """Return the layout of an access's tokens in its buffer; None where the elements of two tokens mix.

    Args:
        dim: counts tokens.
        first: the token of its first index.
    """
    stride, size = access.strides[dim], SIZES.get(access.dtype, 0)
    others = [
        (count, step)
        for place, (count, step) in enumerate(zip(access.shape, access.strides, strict=True))
        if place != dim and count > 1 and step
    ]
    within = [(count, step) for count, step in others if step < stride]
    above = [step for _, step in others if step >= stride]
    if stride == 0 or access.offset % stride + sum((count - 1) * step for count, step in within) >= stride:
        return None
    index, count = access.offset // stride, None
    if above:
        count = min(above) // stride
        if any(step % (count * stride) for step in above) or index % count + access.shape[dim] > count:
            return None
        index %= count
    return _Layout(stride * size, count, first - index)


def _match_tokens(access: Operand, dim: int, demand: _Layout) -> Tokens | None:
    """Return the tokens that an access writes, by their layout."""
    own = _find_layout(access, dim, 0)
    if own is None or (own.stride, own.count) != (demand.stride, demand.count) or demand.base < own.base:
        return None
    return Tokens(demand.base - own.base, access.shape[dim])
