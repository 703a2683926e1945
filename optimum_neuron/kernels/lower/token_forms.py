# SPDX-License-Identifier: Apache-2.0
"""Steps by what they read and write for each token: the part that live.py looks at."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ..steps.effects import find_operands
from ..steps.steps import (
    Attend,
    Convolve,
    Experts,
    Item,
    Linears,
    Map,
    Operand,
    Sample,
    Select,
    Step,
    Tokens,
    TorchCall,
    Walk,
    WriteCache,
    WriteCodes,
)
from ..steps.torch_operators import can_end_early, row_operands


class TokenForm:
    """A step, as far as it concerns tokens.

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

    def choose_dim(self, dim: int) -> bool:
        """Choose the dimension that counts tokens; return False where tokens meet along it."""
        return True

    def limit_step(self, tokens: Tokens) -> Step:
        step: Step = replace(self._step, tokens=tokens)
        return step


class _MapForm(TokenForm):
    """A Map over a domain with a dimension of tokens, or a first one with several rows of each."""

    def __init__(self, step: Map, count: int) -> None:
        step = _split_tokens(step, count)
        accesses = [(item, item.access) for item in step.items if item.access is not None]
        self._domain = max((access.shape for item, access in accesses if not item.rows), key=len, default=())
        outer = _count_outer(self._domain, step)
        self._is_plain = all(access.shape == self._domain[: outer if item.rows else None] for item, access in accesses)
        super().__init__(step, [(access, range(outer)) for item, access in accesses if item.op == "store"], [])

    def choose_dim(self, dim: int) -> bool:
        if not self._is_plain:
            return False
        loads = [item.access for item in self._step.items if item.op == "load"]
        self.reads = [(access, dim) for access in loads if access.strides[dim]]
        self.whole = [access for access in loads if not access.strides[dim]]
        self._step = replace(self._step, items=tuple(_move_to_front(item, dim) for item in self._step.items))
        return True


def _split_tokens(step: Map, count: int) -> Map:
    """Split the first dimension of a Map into tokens and their rows, where it has several rows of each."""
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


def _count_outer(domain: tuple[int, ...], step: Map) -> int:
    """Return how many of a domain's first dimensions are its rows; all where a Map has no rows."""
    if not step.needs_rows:
        return len(domain)
    return next((k for k in range(len(domain) + 1) if math.prod(domain[:k]) == step.rows), 0)


def _move_to_front(item: Item, dim: int) -> Item:
    """Move dimension `dim` of an item's access to the front."""
    if item.access is None:
        return item
    order = [dim, *(place for place in range(len(item.access.shape)) if place != dim)]
    shape, strides = (tuple(values[place] for place in order) for values in (item.access.shape, item.access.strides))
    return replace(item, access=replace(item.access, shape=shape, strides=strides))


class _CallForm(TokenForm):
    """A call of torch that computes row by row, and can take fewer rows."""

    def __init__(self, step: TorchCall, dims: Sequence[int]) -> None:
        super().__init__(step, [(each, dims) for each in step.outputs if each is not None], [])

    def choose_dim(self, dim: int) -> bool:
        taken = row_operands(self._step, dim)
        self.reads = [(operand, dim) for operand in taken]
        self.whole = [each for each in find_operands(self._step.arguments) if each not in taken]
        self._step = replace(self._step, dim=dim)
        return True

    def limit_step(self, tokens: Tokens) -> Step:
        return super().limit_step(tokens) if can_end_early(self._step) else self._step


def find_form(step: Step, count: int) -> TokenForm | None:
    """Return None where a step computes none of `count` tokens by itself."""
    if isinstance(step, Map):
        return _MapForm(step, count)
    if isinstance(step, Linears):
        parameters = [each for layer in step.layers for each in find_operands((layer.weight, layer.bias, layer.codes))]
        return TokenForm(step, [(layer.output, (0,)) for layer in step.layers], [(step.x, 0)], parameters)
    if isinstance(step, Experts):
        parameters = list(find_operands((step.weight, step.bias, step.codes)))
        return TokenForm(step, [(step.output, (0,))], [(step.x, 0), (step.index, 0)], parameters)
    if isinstance(step, WriteCache):
        return TokenForm(step, [], [(step.states, 0), (step.blocks, 0), (step.columns, 0)], [step.cache], is_sink=True)
    if isinstance(step, WriteCodes):
        own = [(step.states, 0), (step.blocks, 0), (step.columns, 0)]
        return TokenForm(step, [], own, [step.codes, step.scale], is_sink=True)
    if isinstance(step, Convolve):
        own = [(each, 0) for each in (step.inputs, step.slots, step.positions)]
        return TokenForm(step, [(step.output, (0,))], own, [step.weight, step.bias, step.state])
    if isinstance(step, Walk):
        reads = [step.query, step.key, step.value, step.decay, step.share, step.slots, step.positions]
        return TokenForm(
            step, [(step.output, (0,))], [(each, 0) for each in reads if each is not None], [step.rates, step.state]
        )
    if isinstance(step, Sample):
        return TokenForm(
            step, [(step.output, (0,))], [(each, 0) for each in (step.logits, step.params, step.uniforms)]
        )
    if isinstance(step, Attend):
        return _form_of_attend(step)
    if isinstance(step, Select):
        return _form_of_select(step)
    first = step.outputs[0] if step.outputs else None
    dims = [] if first is None else [dim for dim in range(len(first.shape)) if row_operands(step, dim)]
    return _CallForm(step, dims) if dims else None


def _form_of_attend(step: Attend) -> TokenForm | None:
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
    return TokenForm(step, [(output, (0,))], [(query, 0)], rest)


def _form_of_select(step: Select) -> TokenForm | None:
    """Return the form of a lookup of rows of a table, or of tokens."""
    if math.prod(step.source.shape[: step.dim]) != 1:
        return None
    row = math.prod(step.source.shape[step.dim + 1 :])
    count = math.prod(step.index.shape)
    output = replace(step.output, shape=(count, row), strides=(row, 1))
    index = replace(step.index, shape=(count,), strides=(1,))
    live = [(step.source, step.dim)] if step.of_live else []
    return TokenForm(step, [(output, (0,))], [(index, 0)], [] if live else [step.source], live=live)
