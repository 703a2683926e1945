# SPDX-License-Identifier: Apache-2.0
"""A plan's steps as the words that native/plan/plan.cpp reads.

Each access is checked against its buffer before, and only here, in encode_products.py and in encode_map.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from ..steps import steps
from ..steps.access import COLUMN_BLOCK, HEAD_DIM_LIMIT, SIZES, TYPES, float_bits, require
from ..steps.operands import Buffer
from ..steps.steps import (
    Attend,
    Convolve,
    Gather,
    Map,
    MatMul,
    Sample,
    Scatter,
    Select,
    Step,
    TopK,
    Walk,
    WriteCache,
    WriteCodes,
)
from .encode_map import count_map_tokens, encode_map
from .encode_products import FLOATS, OperandWords, encode_experts, encode_linears


_COPIED = SIZES | {"int8": 1, "float8_e4m3fn": 1}  # rows of codes are looked up as they are
# Codes of keys and values by their type, as numbered in native/common/kernels.h.
_CACHED_CODINGS = {"int8": 1, "float8_e4m3fn": 3}
_SAMPLING_PARAMS = 4
# Types of marked elements, and the bits that a whole number has there.
_SCATTERED = {"float32": 0, "int32": 0xFFFFFFFF, "bool": 1}


def encode_step(step: Step, buffers: Sequence[Buffer], short_scales: Collection[str] = ()) -> list[int]:
    """Return the words of a step, where all scales of the tensors that `short_scales` names are short (short_scales.py).

    Raises:
        PlanError: it would read or write outside of its buffers, or its operands do not fit each other.
    """
    own = _ENCODERS[type(step)](OperandWords(buffers, short_scales), step)
    words = [list(_ENCODERS).index(type(step)), *_encode_tokens(step), *own]
    require(all(-(1 << 63) <= word < 1 << 63 for word in words), "it has a number of more than 64 bits")
    return words


def _encode_tokens(step: Any) -> tuple[int, int]:
    """Return the first of the tokens of which a step can leave out the last, and their number; 0 where it computes all."""
    if step.tokens is None:
        return 0, 0
    first, count, own = step.tokens.first, step.tokens.count, _count_tokens(step)
    require(first >= 0 and 0 < count == own, f"it has a step for {count} tokens from {first} on that computes {own}")
    return first, count


def _count_tokens(step: Any) -> int:
    """Return the number of tokens that a step computes one by one; 0 where it computes none so."""
    if isinstance(step, Map):
        return count_map_tokens(step)
    if isinstance(step, Attend):
        return step.positions.shape[0] * step.positions.shape[1] if len(step.positions.shape) == 2 else 0
    if isinstance(step, Select):
        return math.prod(step.index.shape) if math.prod(step.source.shape[: step.dim]) == 1 else 0
    rows = getattr(step, step.by_token[-1])
    return int(rows.shape[0]) if rows.shape else 0


def _encode_attend(words: OperandWords, step: Attend) -> Iterator[int]:
    query, keys, values = step.query, step.keys, step.values
    ranks = len(query.shape) == len(keys.shape) == len(values.shape) == 4
    require(query.dtype in FLOATS and ranks, "its attention has no form")
    rows, heads, tokens, dim = query.shape
    blocks, kv_heads, columns, _ = keys.shape
    value_dim = values.shape[3]
    fits = kv_heads > 0 and heads % kv_heads == 0 and query.strides[3] == 1
    fits = fits and 0 < min(dim, value_dim) <= max(dim, value_dim) <= HEAD_DIM_LIMIT
    require(fits, f"its attention has {heads} heads, {kv_heads} of keys, of dimensions {dim} and {value_dim}")
    require(step.blocks is not None or rows <= blocks, "its attention has more rows than blocks")
    table = (rows,) if step.blocks is None else tuple(step.blocks.shape)
    per_row = table[1] if len(table) == 2 else 1
    even = per_row == 1 or columns % COLUMN_BLOCK == 0
    require(table in ((rows,), (rows, per_row)) and even, f"its rows have {list(table)} blocks of {columns} columns")
    yield TYPES[query.dtype]
    yield from words.place(query)
    coding = 0 if step.key_scale is None else _CACHED_CODINGS.get(keys.dtype, 0)
    scaled = (coding > 0) == (step.key_scale is not None) == (step.value_scale is not None)
    require(scaled, f"its attention has keys of {keys.dtype}, of which not all or none have scales")
    for cache, size in ((keys, dim), (values, value_dim)):
        dtype = keys.dtype if coding else query.dtype
        yield from words.contiguous(cache, dtype, (blocks, kv_heads, columns, size), _COPIED)
    yield from words.contiguous(step.output, query.dtype, (rows, tokens, heads, value_dim))
    yield from words.contiguous(step.blocks, "int32", table)
    yield from words.contiguous(step.positions, "int32", (rows, tokens))
    yield from words.contiguous(step.sinks, "float32", (heads,))
    width = -(-columns * per_row // COLUMN_BLOCK) * COLUMN_BLOCK
    yield from words.contiguous(step.column_bias, "float32", (heads, width))
    for scale in (step.key_scale, step.value_scale):
        yield from words.contiguous(scale, "float32", (blocks, kv_heads, columns, 1))
    yield from (coding, rows, heads, tokens, dim, value_dim, kv_heads, columns, blocks, per_row, width)
    yield from (step.window, *query.strides[:3], float_bits(step.scaling), float_bits(step.softcap))


def _encode_select(words: OperandWords, step: Select) -> Iterator[int]:
    source, index, dim = step.source, step.index, step.dim
    require(0 <= dim < len(source.shape) and index.dtype in ("int32", "int64"), "it selects from no dimension")
    before, size, after = source.shape[:dim], source.shape[dim], source.shape[dim + 1 :]
    yield TYPES[index.dtype]
    yield from words.contiguous(source, source.dtype, source.shape, _COPIED)
    yield from words.contiguous(step.output, source.dtype, (*before, *index.shape, *after), _COPIED)
    yield from words.contiguous(index, index.dtype, index.shape)
    yield from (math.prod(before), size, math.prod(index.shape), math.prod(after) * _COPIED[source.dtype], step.wraps)


def _encode_matmul(words: OperandWords, step: MatMul) -> Iterator[int]:
    shapes = [each.shape for each in (step.left, step.right)]
    fits = [len(each) for each in shapes] == [3, 3] and shapes[0][0] == shapes[1][0] and shapes[0][2] == shapes[1][1]
    require(fits, f"it multiplies {list(shapes[0])} by {list(shapes[1])}")
    (matrices, rows, inner), (_, _, columns) = shapes
    yield from words.contiguous(step.left, "float32", (matrices, rows, inner))
    yield from words.contiguous(step.right, "float32", (matrices, inner, columns))
    yield from words.contiguous(step.output, "float32", (matrices, rows, columns))
    yield from (matrices, rows, inner, columns)


def _encode_topk(words: OperandWords, step: TopK) -> Iterator[int]:
    shape, k = step.source.shape, step.values.shape[-1] if step.values.shape else 0
    require(bool(shape) and 0 < k <= shape[-1], f"it takes the {k} largest of rows {list(shape)}")
    yield from words.contiguous(step.source, "float32", shape)
    yield from words.contiguous(step.values, "float32", (*shape[:-1], k))
    yield from words.contiguous(step.columns, "int32", (*shape[:-1], k))
    yield from (math.prod(shape[:-1]), shape[-1], k)


def _encode_by_number(words: OperandWords, step: Gather | Scatter) -> Iterator[int]:
    shape, dtype, index = step.source.shape, step.source.dtype, step.index.shape
    fits = bool(shape) and index[:-1] == shape[:-1] and len(index) == len(shape) and dtype in SIZES
    require(fits and 0 not in (*shape, *index), f"it takes {list(index)} elements of rows {list(shape)}")
    yield from words.contiguous(step.source, dtype, shape)
    yield from words.contiguous(step.index, "int32", index)
    yield from words.contiguous(step.output, dtype, index if isinstance(step, Gather) else shape)
    yield from (math.prod(shape[:-1]), shape[-1], index[-1], SIZES[dtype])
    if isinstance(step, Scatter):
        require(dtype in _SCATTERED, f"it scatters to {dtype}")
        yield from words.contiguous(step.values, dtype, index)
        yield float_bits(step.value) if dtype == "float32" else int(step.value) & _SCATTERED[dtype]


def _encode_write(words: OperandWords, step: WriteCache | WriteCodes) -> Iterator[int]:
    coded = isinstance(step, WriteCodes)
    cache, states = step.codes if isinstance(step, WriteCodes) else step.cache, step.states
    alike = cache.dtype in _CACHED_CODINGS and states.dtype in FLOATS if coded else cache.dtype == states.dtype
    require(alike and len(cache.shape) == 4 and len(states.shape) == 3, "it writes to what is no cache of its kind")
    blocks, heads, length, dim = cache.shape
    tokens = states.shape[0]
    fits = states.shape[1:] == (heads, dim) and (states.strides[2] == 1 or dim == 1)
    require(fits, f"it writes {list(states.shape)} to a cache {list(cache.shape)}")
    if coded:
        yield TYPES[states.dtype]
    yield from words.contiguous(cache, cache.dtype, cache.shape, _COPIED)
    if isinstance(step, WriteCodes):
        yield from words.contiguous(step.scale, "float32", (blocks, heads, length, 1))
    yield from words.place(states)
    for indices in (step.blocks, step.columns):
        yield from words.contiguous(indices, "int32", (tokens,))
    if coded:
        yield from (_CACHED_CODINGS[cache.dtype], blocks, heads, length, dim, tokens, *states.strides[:2])
    else:
        size = SIZES[cache.dtype]
        yield from (blocks, heads, length, dim * size, tokens, states.strides[0] * size, states.strides[1] * size)


def _encode_sample(words: OperandWords, step: Sample) -> Iterator[int]:
    logits = step.logits
    form = logits.dtype == "float32" and len(logits.shape) == 2 and logits.strides[1] == 1
    require(form, "it samples from what are no rows of logits")
    rows, vocab = logits.shape
    yield from words.place(logits)
    yield from words.contiguous(step.params, "float32", (rows, _SAMPLING_PARAMS))
    yield from words.contiguous(step.uniforms, "float32", (rows,))
    yield from words.contiguous(step.output, "int32", (rows,))
    yield from (rows, vocab, logits.strides[0])


def _encode_walk(words: OperandWords, step: Walk) -> Iterator[int]:
    form = len(step.state.shape) == 4 and len(step.key.shape) == len(step.decay.shape) == 3
    require(form, "its recurrence has no form")
    slots, heads, key_dim, value_dim = step.state.shape
    tokens, key_heads, _ = step.key.shape
    decays = step.decay.shape[2]
    allowed = (1, key_dim) if step.rates is None else (value_dim,)
    fits = key_heads > 0 and heads % key_heads == 0 and decays in allowed
    require(step.rates is None or step.share is None, "its recurrence has shares and rates")
    require(fits, f"its recurrence has {heads} heads, {key_heads} of keys, and {decays} decays of {key_dim} rows")
    for keys in (step.query, step.key):
        yield from words.contiguous(keys, "float32", (tokens, key_heads, key_dim))
    yield from words.contiguous(step.value, "float32", (tokens, heads, value_dim))
    yield from words.contiguous(step.decay, "float32", (tokens, heads, decays))
    yield from words.contiguous(step.share, "float32", (tokens, heads))
    yield from words.contiguous(step.rates, "float32", (key_dim, value_dim))
    for indices in (step.slots, step.positions):
        yield from words.contiguous(indices, "int32", (tokens,))
    yield from words.contiguous(step.state, "float32", (slots, heads, key_dim, value_dim))
    yield from words.contiguous(step.output, "float32", (tokens, heads, value_dim))
    yield from (tokens, heads, key_heads, key_dim, value_dim, decays, slots - 1)


def _encode_convolve(words: OperandWords, step: Convolve) -> Iterator[int]:
    inputs, state = step.inputs, step.state
    form = len(inputs.shape) == 2 and len(state.shape) == 3 and inputs.dtype in FLOATS and 0 not in state.shape
    require(form, "its convolution has no form")
    tokens, channels = inputs.shape
    slots, past, kept = state.shape
    adjacent = inputs.strides[1] == 1 or channels == 1
    require(adjacent and kept == channels, f"its convolution has {channels} channels, and keeps {kept}")
    yield TYPES[inputs.dtype]
    yield from words.place(inputs)
    yield from words.contiguous(step.weight, "float32", (past + 1, channels))
    yield from words.contiguous(step.bias, "float32", (channels,))
    for indices in (step.slots, step.positions):
        yield from words.contiguous(indices, "int32", (tokens,))
    yield from words.contiguous(state, inputs.dtype, (slots, past, channels))
    yield from words.contiguous(step.output, "float32", (tokens, channels))
    yield from (tokens, channels, past, slots - 1, inputs.strides[0])


# In the order in which native/plan/plan.cpp numbers the kinds of steps.
_ENCODERS: dict[type[Any], Callable[[OperandWords, Any], Iterator[int]]] = {
    Map: encode_map,
    steps.Linears: encode_linears,
    steps.Experts: encode_experts,
    Attend: _encode_attend,
    Select: _encode_select,
    WriteCache: _encode_write,
    Sample: _encode_sample,
    Walk: _encode_walk,
    Convolve: _encode_convolve,
    WriteCodes: _encode_write,
    MatMul: _encode_matmul,
    TopK: _encode_topk,
    Gather: _encode_by_number,
    Scatter: _encode_by_number,
}
