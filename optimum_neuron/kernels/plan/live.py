# SPDX-License-Identifier: Apache-2.0
"""Which steps of a plan compute each token by itself: they leave out what follows the last live token of a run.

A short chunk ends in padding and idle rows are not live. What they would compute nobody reads, so long as every step on the
way takes a token's values from that token alone. So demand is followed backwards, from the outputs and the cache: of each
buffer, whether all of it is needed, or the part of live tokens, and how tokens lie in it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .access import SIZES
from .effects import operands_of
from .program import (
    Attend,
    Buffer,
    Convolve,
    Experts,
    Item,
    Linears,
    Map,
    Operand,
    Plan,
    Sample,
    Select,
    Step,
    Tokens,
    TorchCall,
    Walk,
    WriteCache,
    WriteCodes,
)
from .row_calls import can_end_early, row_operands


@dataclass(frozen=True)
class _Layout:
    """How tokens lie in a buffer.

    Attributes:
        stride: bytes from a token to the next.
        count: tokens in a row of them, where there are several rows: a head's, say.
        base: the first one.
    """

    stride: int
    count: int | None
    base: int


class _Conflict:
    """Stands for a buffer that is needed whole."""


_WHOLE = _Conflict()
_Demand = _Layout | _Conflict


def leave_out_dead(plan: Plan, count: int, by_token: Collection[str]) -> Plan:
    """The plan with `tokens` at the steps that compute each token by itself.

    Args:
        count: the graph's tokens.
        by_token: the outputs that have a row per token; of the others all is needed.
    """
    if count < 2:
        return plan
    demands = _Demands(plan.buffers, count, by_token)
    steps = [demands.follow(step) for step in reversed(plan.steps)]
    return replace(plan, steps=tuple(steps[::-1]))


class _Demands:
    """What is needed of each buffer by the steps that were followed so far."""

    def __init__(self, buffers: Sequence[Buffer], count: int, by_token: Collection[str]) -> None:
        self._buffers = buffers
        self._count = count
        self._of: dict[int, _Demand] = {}
        for index, buffer in enumerate(buffers):
            if buffer.kind == "output":
                each = buffer.bytes // count
                self._of[index] = _Layout(each, None, 0) if buffer.name in by_token and each else _WHOLE

    def follow(self, step: Step) -> Step:
        """A step with what it can leave out; adds what it needs to the demands."""
        form = _form(step, self._count)
        tokens = None if form is None else self._tokens(form)
        live = [] if form is None else form.live
        if form is None or tokens is None:
            spared = [access for access, _ in live]
            self._need_all(each for each in operands_of(step) if each not in spared)
        else:
            self._need_all(form.whole)
            for access, dim in form.reads:
                self._need(access, _layout(access, dim, tokens.first))
            step = form.limited(tokens)
        for access, dim in live:
            self._need(access, _layout(access, dim, 0))
        return step

    def _tokens(self, form: _Form) -> Tokens | None:
        """Those that a step computes; None where they do not follow from what is needed of it."""
        found: set[tuple[int, Tokens]] = set()
        for access, dims in form.writes:
            demand = self._of.get(access.buffer)
            if self._buffers[access.buffer].kind not in ("arena", "output") or isinstance(demand, _Conflict):
                return None
            if demand is not None:
                fitting = [(dim, tokens) for dim in dims if (tokens := _match(access, dim, demand)) is not None]
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
        return tokens if form.choose(dim) else None

    def _need(self, access: Operand, layout: _Layout | None) -> None:
        known = self._of.get(access.buffer)
        if layout is None or known not in (None, layout):
            self._of[access.buffer] = _WHOLE
        else:
            self._of[access.buffer] = layout

    def _need_all(self, operands: Iterable[Operand]) -> None:
        for each in operands:
            self._of[each.buffer] = _WHOLE


def _layout(access: Operand, dim: int, first: int) -> _Layout | None:
    """How the tokens of an access lie in its buffer; None where the elements of two could not be told apart.

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


def _match(access: Operand, dim: int, demand: _Layout) -> Tokens | None:
    """The tokens that an access writes, by how they lie."""
    own = _layout(access, dim, 0)
    if own is None or (own.stride, own.count) != (demand.stride, demand.count) or demand.base < own.base:
        return None
    return Tokens(demand.base - own.base, access.shape[dim])


class _Form:
    """A step, as far as tokens are concerned.

    Attributes:
        writes: its outputs, each with the dimensions that may count tokens.
        reads: its operands of a token each, with the dimension that counts them.
        whole: its other operands.
        live: operands of which it reads live tokens alone, whatever is needed of it, with their dimension of tokens.
        is_sink: whether it writes for live tokens only, whatever is needed.
    """

    def __init__(
        self,
        step: Any,
        writes: Iterable[tuple[Operand, Sequence[int]]],
        reads: Iterable[tuple[Operand, int]],
        whole: Iterable[Operand | None] = (),
        *,
        live: Iterable[tuple[Operand, int]] = (),
        is_sink: bool = False,
    ) -> None:
        self.writes = list(writes)
        self.reads = list(reads)
        self.whole = [each for each in whole if each is not None]
        self.live = list(live)
        self.is_sink = is_sink
        self._step = step

    def choose(self, dim: int) -> bool:
        """Settles which dimension counts tokens; False where the step takes them from one another along it."""
        return True

    def limited(self, tokens: Tokens) -> Step:
        step: Step = replace(self._step, tokens=tokens)
        return step


class _MapForm(_Form):
    """A Map, whose domain has a dimension of tokens, or begins with one of several rows of each."""

    def __init__(self, step: Map, count: int) -> None:
        step = _by_token(step, count)
        accesses = [(item, item.access) for item in step.items if item.access is not None]
        self._domain = max((access.shape for item, access in accesses if not item.rows), key=len, default=())
        outer = _outer(self._domain, step)
        self._is_plain = all(access.shape == self._domain[: outer if item.rows else None] for item, access in accesses)
        super().__init__(step, [(access, range(outer)) for item, access in accesses if item.op == "store"], [])

    def choose(self, dim: int) -> bool:
        if not self._is_plain:
            return False
        loads = [item.access for item in self._step.items if item.op == "load"]
        self.reads = [(access, dim) for access in loads if access.strides[dim]]
        self.whole = [access for access in loads if not access.strides[dim]]
        self._step = replace(self._step, items=tuple(_outermost(item, dim) for item in self._step.items))
        return True


def _by_token(step: Map, count: int) -> Map:
    """A Map whose first dimension has several rows of each token, with a dimension for either, of the same order."""
    shapes = {item.access.shape[:1] for item in step.items if item.access is not None}
    first = shapes.pop()[0] if len(shapes) == 1 and () not in shapes else 0
    if first <= count or first % count:
        return step
    return replace(step, items=tuple(_split_first(item, first // count) for item in step.items))


def _split_first(item: Item, each: int) -> Item:
    if item.access is None:
        return item
    (first, *shape), (stride, *strides) = item.access.shape, item.access.strides
    split = replace(item.access, shape=(first // each, each, *shape), strides=(stride * each, stride, *strides))
    return replace(item, access=split)


def _outer(domain: tuple[int, ...], step: Map) -> int:
    """How many of a domain's first dimensions are its rows; of a Map without rows, all."""
    if not step.needs_rows:
        return len(domain)
    return next((k for k in range(len(domain) + 1) if math.prod(domain[:k]) == step.rows), 0)


def _outermost(item: Item, dim: int) -> Item:
    """An item of a Map whose domain begins with its dimension `dim`."""
    if item.access is None:
        return item
    order = [dim, *(place for place in range(len(item.access.shape)) if place != dim)]
    shape, strides = (tuple(values[place] for place in order) for values in (item.access.shape, item.access.strides))
    return replace(item, access=replace(item.access, shape=shape, strides=strides))


class _CallForm(_Form):
    """A call of torch that computes row by row, and can be made of fewer rows."""

    def __init__(self, step: TorchCall, dims: Sequence[int]) -> None:
        super().__init__(step, [(each, dims) for each in step.outputs if each is not None], [])

    def choose(self, dim: int) -> bool:
        taken = row_operands(self._step, dim)
        self.reads = [(operand, dim) for operand in taken]
        self.whole = [each for each in operands_of(self._step.arguments) if each not in taken]
        self._step = replace(self._step, dim=dim)
        return True

    def limited(self, tokens: Tokens) -> Step:
        return super().limited(tokens) if can_end_early(self._step) else self._step


def _form(step: Step, count: int) -> _Form | None:
    """None where a step computes none of `count` tokens by itself."""
    if isinstance(step, Map):
        return _MapForm(step, count)
    if isinstance(step, Linears):
        parameters = [each for layer in step.layers for each in operands_of((layer.weight, layer.bias, layer.codes))]
        return _Form(step, [(layer.output, (0,)) for layer in step.layers], [(step.x, 0)], parameters)
    if isinstance(step, Experts):
        parameters = list(operands_of((step.weight, step.bias, step.codes)))
        return _Form(step, [(step.output, (0,))], [(step.x, 0), (step.index, 0)], parameters)
    if isinstance(step, WriteCache):
        return _Form(step, [], [(step.states, 0), (step.blocks, 0), (step.columns, 0)], [step.cache], is_sink=True)
    if isinstance(step, WriteCodes):
        own = [(step.states, 0), (step.blocks, 0), (step.columns, 0)]
        return _Form(step, [], own, [step.codes, step.scale], is_sink=True)
    if isinstance(step, Convolve):
        own = [(each, 0) for each in (step.inputs, step.slots, step.positions)]
        return _Form(step, [(step.output, (0,))], own, [step.weight, step.bias, step.state])
    if isinstance(step, Walk):
        reads = [step.query, step.key, step.value, step.decay, step.share, step.slots, step.positions]
        return _Form(
            step, [(step.output, (0,))], [(each, 0) for each in reads if each is not None], [step.rates, step.state]
        )
    if isinstance(step, Sample):
        return _Form(step, [(step.output, (0,))], [(each, 0) for each in (step.logits, step.params, step.uniforms)])
    if isinstance(step, Attend):
        return _attend(step)
    if isinstance(step, Select):
        return _select(step)
    first = step.outputs[0] if step.outputs else None
    dims = [] if first is None else [dim for dim in range(len(first.shape)) if row_operands(step, dim)]
    return _CallForm(step, dims) if dims else None


def _attend(step: Attend) -> _Form | None:
    rows, heads, tokens, dim = step.query.shape
    by_row, by_head, by_token, by_element = step.query.strides
    if rows > 1 and tokens > 1 and by_row != tokens * by_token:
        return None
    count = rows * tokens
    stride = by_token if tokens > 1 else by_row
    query = replace(step.query, shape=(count, heads, dim), strides=(stride, by_head, by_element))
    output = replace(step.output, shape=(count, heads * dim), strides=(heads * dim, 1))
    scales = [step.key_scale, step.value_scale]
    rest = [step.keys, step.values, step.blocks, step.positions, step.sinks, step.column_bias, *scales]
    return _Form(step, [(output, (0,))], [(query, 0)], rest)


def _select(step: Select) -> _Form | None:
    """Rows of a table, or of tokens."""
    if math.prod(step.source.shape[: step.dim]) != 1:
        return None
    row = math.prod(step.source.shape[step.dim + 1 :])
    count = math.prod(step.index.shape)
    output = replace(step.output, shape=(count, row), strides=(row, 1))
    index = replace(step.index, shape=(count,), strides=(1,))
    live = [(step.source, step.dim)] if step.of_live else []
    return _Form(step, [(output, (0,))], [(index, 0)], [] if live else [step.source], live=live)
