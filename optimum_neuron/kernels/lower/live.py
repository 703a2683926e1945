# SPDX-License-Identifier: Apache-2.0
"""Steps that compute each token by itself leave out what follows the last live token of a run.

A short chunk ends in padding and idle rows are not live. Their results are not read, so long as each step on the
way takes a token's values from that token alone. So demand is followed backwards, from the outputs and the cache: of each
buffer, whether all of it is needed, or the part of live tokens, and how tokens lie in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..plan import Plan
from ..steps.access import SIZES, find_operands, list_outputs
from ..steps.operands import Buffer, Operand, Tokens
from ..steps.steps import Attend, Map, Select, Step


@dataclass(frozen=True)
class _Layout:
    """The layout of tokens in a buffer, `base` first: `stride` bytes apart, `count` in a row where there are several rows, as a head's."""

    stride: int
    count: int | None
    base: int


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
        self._of: dict[int, _Layout | None] = {}  # None: all of a buffer
        for index, buffer in enumerate(buffers):
            if buffer.kind == "output":
                each = buffer.bytes // count
                self._of[index] = _Layout(each, None, 0) if buffer.name in by_token and each else None

    def follow_step(self, step: Step) -> Step:
        """Return a step with what it can leave out, and add what it needs to the demands."""
        form = _find_form(step, self._count)
        tokens = self._find_tokens(form)
        parts = [(access, _find_layout(access, dim, 0)) for access, dim in form.live]
        if tokens is None:
            spared = [access for access, _ in parts]
            whole: Iterable[Operand] = (each for each in find_operands(step) if each not in spared)
        else:
            whole = form.whole
            parts += [(access, _find_layout(access, dim, tokens.first)) for access, dim in form.reads]
            step = replace(form.step, tokens=tokens)
        for each in whole:
            self._of[each.buffer] = None
        for access, layout in parts:
            alike = self._of.get(access.buffer, layout) == layout
            self._of[access.buffer] = layout if alike else None
        return step

    def _find_tokens(self, form: _Form) -> Tokens | None:
        """Return the tokens that a step computes; None where they do not follow from the demands."""
        found: set[tuple[int, Tokens]] = set()
        for access, dims in form.writes:
            if self._buffers[access.buffer].kind not in ("arena", "output"):
                return None
            if access.buffer in self._of:
                demand, fitting = self._of[access.buffer], []
                for dim in dims:
                    own = _find_layout(access, dim, 0)
                    if own and demand and replace(own, base=demand.base) == demand and demand.base >= own.base:
                        fitting.append((dim, Tokens(demand.base - own.base, access.shape[dim])))
                if len(fitting) != 1:
                    return None
                found.add(fitting[0])
        if not form.writes and form.reads:  # it writes to the cache, for live tokens only
            access, dim = form.reads[0]
            if access.shape[dim] == self._count:
                found.add((0, Tokens(0, self._count)))
        if len(found) != 1:
            return None
        dim, tokens = found.pop()
        return tokens if form.choose_dim(dim) else None


def _find_layout(access: Operand, dim: int, first: int) -> _Layout | None:
    """Return the layout of tokens in the buffer of an access; None where the elements of two tokens mix.

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


@dataclass
class _Form:
    """A step, as far as it concerns tokens.

    It `writes` outputs, each with the dimensions that may count tokens. It `reads` operands of a token each, with the dimension that counts
    them, and others `whole`. Of those in `live` it reads live tokens alone, whatever is needed of it.
    """

    step: Any
    writes: Sequence[tuple[Operand, Iterable[int]]] = ()
    reads: Sequence[tuple[Operand, int]] = ()
    whole: Sequence[Operand] = ()
    live: Sequence[tuple[Operand, int]] = ()

    def choose_dim(self, dim: int) -> bool:
        """Choose the dimension that counts tokens; return False where tokens meet along it."""
        return True


class _MapForm(_Form):
    """A Map over a domain with a dimension of tokens, or a first one with several rows of each."""

    def __init__(self, step: Map, count: int) -> None:
        firsts = {item.access.shape[:1] for item in step.items if item.access is not None}
        first = firsts.pop()[0] if len(firsts) == 1 and () not in firsts else 0
        if first > count and not first % count:
            each = first // count  # rows of a token, in a dimension of their own

            def split_first(access: Operand) -> Operand:
                stride, *strides = access.strides
                shape = (count, each, *access.shape[1:])
                return replace(access, shape=shape, strides=(stride * each, stride, *strides))

            step = _change_accesses(step, split_first)
        accesses = [(item, item.access) for item in step.items if item.access is not None]
        domain = max((access.shape for item, access in accesses if not item.rows), key=len, default=())
        outer = len(domain)
        if step.needs_rows:
            outer = next((k for k in range(outer + 1) if math.prod(domain[:k]) == step.rows), 0)
        self._is_plain = all(access.shape == domain[: outer if item.rows else None] for item, access in accesses)
        super().__init__(step, [(access, range(outer)) for item, access in accesses if item.op == "store"])

    def choose_dim(self, dim: int) -> bool:
        if not self._is_plain:
            return False
        loads = [item.access for item in self.step.items if item.op == "load"]
        self.reads = [(access, dim) for access in loads if access.strides[dim]]
        self.whole = [access for access in loads if not access.strides[dim]]

        def move_to_front(access: Operand) -> Operand:
            order = [dim, *(place for place in range(len(access.shape)) if place != dim)]
            shape, strides = (tuple(values[place] for place in order) for values in (access.shape, access.strides))
            return replace(access, shape=shape, strides=strides)

        self.step = _change_accesses(self.step, move_to_front)
        return True


def _change_accesses(step: Map, change: Callable[[Operand], Operand]) -> Map:
    items = (each if each.access is None else replace(each, access=change(each.access)) for each in step.items)
    return replace(step, items=tuple(items))


def _find_form(step: Step, count: int) -> _Form:
    """Return the form of a step, which is empty where it computes none of `count` tokens by itself."""
    if isinstance(step, Map):
        return _MapForm(step, count)
    if isinstance(step, Attend):
        return _find_attend_form(step)
    if isinstance(step, Select):
        return _find_select_form(step)
    outputs = list_outputs(step)
    reads = [each for name in step.by_token if (each := getattr(step, name)) is not None]
    whole = [each for each in find_operands(step) if not any(each is other for other in (*outputs, *reads))]
    return _Form(step, [(each, (0,)) for each in outputs], [(each, 0) for each in reads], whole)


def _find_attend_form(step: Attend) -> _Form:
    rows, heads, tokens, dim = step.query.shape
    by_row, by_head, by_token, by_element = step.query.strides
    if rows > 1 and tokens > 1 and by_row != tokens * by_token:
        return _Form(step)
    stride = by_token if tokens > 1 else by_row
    query = replace(step.query, shape=(rows * tokens, heads, dim), strides=(stride, by_head, by_element))
    size = heads * step.output.shape[-1]
    output = replace(step.output, shape=(rows * tokens, size), strides=(size, 1))
    whole = [each for each in find_operands(step) if each is not step.query and each is not step.output]
    return _Form(step, [(output, (0,))], [(query, 0)], whole)


def _find_select_form(step: Select) -> _Form:
    """Return the form of a lookup of rows of a table, or of tokens."""
    if math.prod(step.source.shape[: step.dim]) != 1:
        return _Form(step)
    row = math.prod(step.source.shape[step.dim + 1 :])
    count = math.prod(step.index.shape)
    output = replace(step.output, shape=(count, row), strides=(row, 1))
    index = replace(step.index, shape=(count,), strides=(1,))
    live, whole = ([(step.source, step.dim)], []) if step.of_live else ([], [step.source])
    return _Form(step, [(output, (0,))], [(index, 0)], whole, live)
