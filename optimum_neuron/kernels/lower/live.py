# SPDX-License-Identifier: Apache-2.0
"""Steps that compute each token by itself leave out what follows the last live token of a run.

A short chunk ends in padding and idle rows are not live. Their results are not read, so long as each step on the
way takes a token's values from that token alone. So demand is followed backwards, from the outputs and the cache: of each
buffer, whether all of it is needed, or the part of live tokens, and how tokens lie in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ..plan import Plan
from ..steps.access import BY_TOKEN, SIZES, find_operands
from ..steps.steps import Attend, Buffer, Linears, Map, Operand, Select, Step, Tokens, TorchCall
from ..steps.torch_operators import COMPUTED_WHOLE, row_operands


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

    def _find_tokens(self, form: _Form) -> Tokens | None:
        """Return the tokens that a step computes; None where they do not follow from the demands."""
        found: set[tuple[int, Tokens]] = set()
        for access, dims in form.writes:
            if self._buffers[access.buffer].kind not in ("arena", "output"):
                return None
            if access.buffer in self._of:
                fitting = _match_tokens(access, dims, self._of[access.buffer])
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

    def _need_part(self, access: Operand, layout: _Layout | None) -> None:
        alike = self._of.get(access.buffer, layout) == layout
        self._of[access.buffer] = layout if alike else None

    def _need_all(self, operands: Iterable[Operand]) -> None:
        for each in operands:
            self._of[each.buffer] = None


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


def _match_tokens(access: Operand, dims: Iterable[int], demand: _Layout | None) -> list[tuple[int, Tokens]]:
    """List the dimensions that may count the tokens that are needed of what an access writes, with those tokens."""
    found = []
    for dim in dims:
        own = _find_layout(access, dim, 0)
        if own and demand and replace(own, base=demand.base) == demand and demand.base >= own.base:
            found.append((dim, Tokens(demand.base - own.base, access.shape[dim])))
    return found


class _Form:
    """A step, as far as it concerns tokens.

    Attributes:
        writes: its outputs, each with the dimensions that may count tokens.
        reads: its operands of a token each, with the dimension that counts them.
        whole: its other operands.
        live: operands of which it reads live tokens alone, whatever is needed of it, with their dimension of tokens.
    """

    def __init__(
        self,
        step: Any,
        writes: Iterable[tuple[Operand, Iterable[int]]],
        reads: Iterable[tuple[Operand, int]] = (),
        whole: Iterable[Operand] = (),
        live: Iterable[tuple[Operand, int]] = (),
    ) -> None:
        self.writes, self.reads, self.whole, self.live = list(writes), list(reads), list(whole), list(live)
        self._step = step

    def choose_dim(self, dim: int) -> bool:
        """Choose the dimension that counts tokens; return False where tokens meet along it."""
        return True

    def limit_step(self, tokens: Tokens) -> Step:
        step: Step = replace(self._step, tokens=tokens)
        return step


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
        loads = [item.access for item in self._step.items if item.op == "load"]
        self.reads = [(access, dim) for access in loads if access.strides[dim]]
        self.whole = [access for access in loads if not access.strides[dim]]

        def move_to_front(access: Operand) -> Operand:
            order = [dim, *(place for place in range(len(access.shape)) if place != dim)]
            shape, strides = (tuple(values[place] for place in order) for values in (access.shape, access.strides))
            return replace(access, shape=shape, strides=strides)

        self._step = _change_accesses(self._step, move_to_front)
        return True


def _change_accesses(step: Map, change: Callable[[Operand], Operand]) -> Map:
    items = (each if each.access is None else replace(each, access=change(each.access)) for each in step.items)
    return replace(step, items=tuple(items))


class _CallForm(_Form):
    """A call of torch that computes row by row, and can take fewer rows."""

    def choose_dim(self, dim: int) -> bool:
        taken = row_operands(self._step, dim)
        self.reads = [(operand, dim) for operand in taken]
        self.whole = [each for each in find_operands(self._step.arguments) if each not in taken]
        self._step = replace(self._step, dim=dim)
        return True

    def limit_step(self, tokens: Tokens) -> Step:
        step: Step = self._step
        # Of some, the bits of a row depend on how many there are: rows of any are computed always.
        return step if self._step.operator in COMPUTED_WHOLE else super().limit_step(tokens)


def _find_form(step: Step, count: int) -> _Form | None:
    """Return None where a step computes none of `count` tokens by itself."""
    if isinstance(step, Map):
        return _MapForm(step, count)
    if isinstance(step, Linears):
        parts = ((layer.weight, layer.bias, layer.codes) for layer in step.layers)
        return _Form(step, [(layer.output, (0,)) for layer in step.layers], [(step.x, 0)], find_operands([*parts]))
    if isinstance(step, Attend):
        return _find_attend_form(step)
    if isinstance(step, Select):
        return _find_select_form(step)
    if isinstance(step, TorchCall):
        first = step.outputs[0] if step.outputs else None
        dims = [] if first is None else [dim for dim in range(len(first.shape)) if row_operands(step, dim)]
        return _CallForm(step, [(each, dims) for each in step.outputs if each is not None]) if dims else None
    names = BY_TOKEN[type(step)]
    output = getattr(step, "output", None)
    reads = [(each, 0) for name in names if (each := getattr(step, name)) is not None]
    return _Form(step, [] if output is None else [(output, (0,))], reads, _list_others(step, *names, "output"))


def _list_others(step: Any, *names: str) -> list[Operand]:
    """List the operands in a step's other members."""
    members = [getattr(step, member.name) for member in fields(step) if member.name not in names]
    return list(find_operands(members))


def _find_attend_form(step: Attend) -> _Form | None:
    rows, heads, tokens, dim = step.query.shape
    by_row, by_head, by_token, by_element = step.query.strides
    if rows > 1 and tokens > 1 and by_row != tokens * by_token:
        return None
    stride = by_token if tokens > 1 else by_row
    query = replace(step.query, shape=(rows * tokens, heads, dim), strides=(stride, by_head, by_element))
    output = replace(step.output, shape=(rows * tokens, heads * dim), strides=(heads * dim, 1))
    return _Form(step, [(output, (0,))], [(query, 0)], _list_others(step, "query", "output"))


def _find_select_form(step: Select) -> _Form | None:
    """Return the form of a lookup of rows of a table, or of tokens."""
    if math.prod(step.source.shape[: step.dim]) != 1:
        return None
    row = math.prod(step.source.shape[step.dim + 1 :])
    count = math.prod(step.index.shape)
    output = replace(step.output, shape=(count, row), strides=(row, 1))
    index = replace(step.index, shape=(count,), strides=(1,))
    live, whole = ([(step.source, step.dim)], []) if step.of_live else ([], [step.source])
    return _Form(step, [(output, (0,))], [(index, 0)], whole, live)
