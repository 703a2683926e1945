# SPDX-License-Identifier: Apache-2.0
"""A plan's steps as the words that native/plan.cpp reads. Every access is checked against its buffer before, and only here and in
encode_map.py.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from ...step.features.codes.weight import MEET_CODED
from ..plan.access import SIZES, TYPES, check_operand, float_bits, require
from ..plan.program import (
    Attend,
    Buffer,
    Codes,
    Convolve,
    Experts,
    Layer,
    Linears,
    Map,
    Operand,
    Sample,
    Select,
    Step,
    Walk,
    WriteCache,
    WriteCodes,
)
from .encode_map import encode_map, map_tokens
from .short_scales import can_be_short


_COPIED = SIZES | {"int8": 1, "float8_e4m3fn": 1}  # rows of codes are looked up as they are
_FLOATS = ("float32", "bfloat16", "float16")
# Kinds of codes, as numbered in native/kernels.h: each with its number and the type that holds codes, of 4 bits two at a time.
_CODINGS = {"int8": (1, "int8"), "int4": (2, "uint8"), "fp8": (3, "float8_e4m3fn"), "fp4": (4, "uint8")}
# Those of keys and values, by their type.
_CACHED_CODINGS = {"int8": 1, "float8_e4m3fn": 3}
# What rows of x are rounded to before they meet codes, by kinds of these.
_ACTIVATIONS = {None: 0, "int8": 1}
_TWO_TO_A_BYTE = ("int4", "fp4")
_KINDS: dict[type[Any], int] = {
    Map: 0,
    Linears: 1,
    Experts: 2,
    Attend: 3,
    Select: 4,
    WriteCache: 5,
    Sample: 6,
    Walk: 7,
    Convolve: 8,
    WriteCodes: 9,
}
_MAX_HEAD_DIM, _HEAD_DIM_STEP = 256, 16
# Columns that the kernel of attention takes at a time, which lie in one block: kBlock of native/attention_call.h.
SOFTMAX_BLOCK = 64
_SAMPLING_PARAMS = 4


def encode(step: Step, buffers: Sequence[Buffer], short_scales: Collection[str] = ()) -> list[int]:
    """The words of a step.

    Args:
        short_scales: names of the tensors in which all scales are short (short_scales.py).

    Raises:
        PlanError: it would read or write outside of its buffers, or its operands do not fit each other.
    """
    encoder = _Encoder(buffers, short_scales)
    write: dict[type[Any], Any] = {
        Map: encoder.map,
        Linears: encoder.linears,
        Experts: encoder.experts,
        Attend: encoder.attend,
        Select: encoder.select,
        WriteCache: encoder.write_cache,
        Sample: encoder.sample,
        Walk: encoder.walk,
        Convolve: encoder.convolve,
        WriteCodes: encoder.write_codes,
    }
    words = [_KINDS[type(step)], *_tokens(step), *write[type(step)](step)]
    require(all(-(1 << 63) <= word < 1 << 63 for word in words), "it has a number of more than 64 bits")
    return words


def _tokens(step: Any) -> tuple[int, int]:
    """Of which tokens a step can leave out the last: the first one, and their number; 0 where it computes all."""
    if step.tokens is None:
        return 0, 0
    first, count = step.tokens.first, step.tokens.count
    own = _token_count(step)
    require(first >= 0 and 0 < count == own, f"it has a step for {count} tokens from {first} on that computes {own}")
    return first, count


def _token_count(step: Any) -> int:
    """How many tokens a step computes, if it computes any by itself."""
    if isinstance(step, Map):
        return map_tokens(step)
    if isinstance(step, Attend):
        return step.positions.shape[0] * step.positions.shape[1] if len(step.positions.shape) == 2 else 0
    if isinstance(step, Select):
        return math.prod(step.index.shape) if math.prod(step.source.shape[: step.dim]) == 1 else 0
    if isinstance(step, Convolve | Walk):
        return step.slots.shape[0] if step.slots.shape else 0
    if isinstance(step, Sample):
        return step.logits.shape[0] if step.logits.shape else 0
    rows = step.x if isinstance(step, Linears) else step.index if isinstance(step, Experts) else step.states
    return int(rows.shape[0]) if rows.shape else 0


def _is_contiguous(operand: Operand) -> bool:
    expected = 1
    for size, stride in zip(reversed(operand.shape), reversed(operand.strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


class _Encoder:
    def __init__(self, buffers: Sequence[Buffer], short_scales: Collection[str]) -> None:
        self._buffers = buffers
        self._short_scales = short_scales

    def _place(self, operand: Operand | None, sizes: Mapping[str, int] = SIZES) -> Iterator[int]:
        if operand is None:
            yield from (-1, 0)
        else:
            check_operand(operand, self._buffers)
            require(0 not in operand.shape and operand.dtype in sizes, "it has an operand that no kernel takes")
            yield from (operand.buffer, operand.offset * sizes[operand.dtype])

    def _contiguous(
        self, operand: Operand | None, dtype: str, shape: tuple[int, ...], sizes: Mapping[str, int] = SIZES
    ) -> Iterator[int]:
        if operand is not None:
            fits = operand.dtype == dtype and tuple(operand.shape) == shape and _is_contiguous(operand)
            require(fits, f"it takes {operand.dtype} {list(operand.shape)} where {dtype} {list(shape)} belongs")
        yield from self._place(operand, sizes)

    def map(self, step: Map) -> Iterator[int]:
        return encode_map(step, self._buffers)

    def linears(self, step: Linears) -> Iterator[int]:
        x = step.x
        require(
            x.dtype in _FLOATS and len(x.shape) == 2 and x.strides[1] == 1, "it has a linear layer of another form"
        )
        rows, columns = x.shape
        forms = {self._form(layer.codes, columns) for layer in step.layers}
        require(len(forms) == 1, "it has a step of linear layers whose weights are quantized in several ways")
        yield TYPES[x.dtype]
        yield from self._place(x)
        yield from (rows, columns, x.strides[0], *forms.pop(), len(step.layers))
        for layer in step.layers:
            yield from self._layer(layer, x)

    def _layer(self, layer: Layer, x: Operand) -> Iterator[int]:
        output = layer.output
        fits = output.dtype == x.dtype and len(output.shape) == 2 and output.strides[1] == 1
        require(fits and output.shape[0] == x.shape[0], "it has a linear layer whose output does not fit its input")
        outputs = output.shape[1]
        yield from self._weight(layer.weight, layer.codes, x.dtype, (outputs, x.shape[1]))
        yield from self._contiguous(layer.bias, x.dtype, (outputs,))
        yield from self._place(output)
        yield from (outputs, output.strides[0])
        yield from self._scales(layer.codes, (outputs,))

    def _form(self, codes: Codes | None, columns: int) -> tuple[int, int, int]:
        """Which codes a weight has, how many columns share a scale, and which codes rows of x become."""
        if codes is None:
            return 0, 0, 0
        groups = codes.scale.shape[-1] if codes.scale.shape else 0
        least = 2 if codes.kind in _TWO_TO_A_BYTE else 1
        fits = codes.kind in _CODINGS and groups > 0 and columns % (groups * least) == 0
        require(fits, f"it has a weight of {codes.kind} with {groups} scales for {columns} columns")
        known = codes.activations is None or (codes.activations in _ACTIVATIONS and codes.kind in MEET_CODED)
        require(known, f"it has activations of {codes.activations} with a weight of {codes.kind}")
        return _CODINGS[codes.kind][0], columns // groups, _ACTIVATIONS[codes.activations]

    def _weight(self, weight: Operand, codes: Codes | None, dtype: str, shape: tuple[int, ...]) -> Iterator[int]:
        if codes is None:
            yield from self._contiguous(weight, dtype, shape)
            return
        packed = codes.kind in _TWO_TO_A_BYTE
        own, held = (*shape[:-1], shape[-1] // 2 if packed else shape[-1]), _CODINGS[codes.kind][1]
        fits = weight.dtype == held and tuple(weight.shape) == own and _is_contiguous(weight)
        require(fits, f"it takes {weight.dtype} {list(weight.shape)} where {held} {list(own)} belongs")
        check_operand(weight, self._buffers)
        yield from (weight.buffer, weight.offset)

    def _scales(self, codes: Codes | None, shape: tuple[int, ...]) -> Iterator[int]:
        if codes is None:
            yield from (-1, 0, -1, 0, 0, 0)
            return
        require(codes.scale.dtype in _FLOATS, f"it has scales of {codes.scale.dtype}")
        require(codes.shift is None or codes.kind in ("int8", "int4"), f"it has a shift of {codes.kind}")
        shape = (*shape, codes.scale.shape[-1])
        yield from self._contiguous(codes.scale, codes.scale.dtype, shape)
        yield from self._contiguous(codes.shift, "float32", shape)
        yield from (TYPES[codes.scale.dtype], self._are_short(codes))

    def _are_short(self, codes: Codes) -> bool:
        if not can_be_short(codes):
            return False
        buffer = self._buffers[codes.scale.buffer]
        return buffer.kind == "tensor" and buffer.name in self._short_scales

    def experts(self, step: Experts) -> Iterator[int]:
        x, weight = step.x, step.weight
        require(
            x.dtype in _FLOATS and x.shape != () and len(weight.shape) == 3 and len(step.index.shape) == 2,
            "its experts have no form",
        )
        tokens, k = step.index.shape
        experts, outputs = weight.shape[:2]
        columns = x.shape[-1]
        per_expert = len(x.shape) == 3
        form = self._form(step.codes, columns)
        yield TYPES[x.dtype]
        yield from self._contiguous(x, x.dtype, (tokens, k, columns) if per_expert else (tokens, columns))
        yield from self._contiguous(step.index, "int64", (tokens, k))
        yield from self._weight(weight, step.codes, x.dtype, (experts, outputs, columns))
        yield from self._contiguous(step.bias, x.dtype, (experts, outputs))
        yield from self._contiguous(step.output, x.dtype, (tokens, k, outputs))
        yield from (per_expert, tokens, k, experts, outputs, columns, *form)
        yield from self._scales(step.codes, (experts, outputs))

    def attend(self, step: Attend) -> Iterator[int]:
        query, keys = step.query, step.keys
        require(query.dtype in _FLOATS and len(query.shape) == len(keys.shape) == 4, "its attention has no form")
        rows, heads, tokens, dim = query.shape
        blocks, kv_heads, columns, _ = keys.shape
        fits = (
            kv_heads > 0
            and heads % kv_heads == 0
            and dim % _HEAD_DIM_STEP == 0
            and dim <= _MAX_HEAD_DIM
            and query.strides[3] == 1
        )
        require(fits, f"its attention has {heads} heads, {kv_heads} of keys, of dimension {dim}")
        require(step.blocks is not None or rows <= blocks, "its attention has more rows than blocks")
        table = (rows,) if step.blocks is None else tuple(step.blocks.shape)
        per_row = table[1] if len(table) == 2 else 1
        even = per_row == 1 or columns % SOFTMAX_BLOCK == 0
        require(
            table in ((rows,), (rows, per_row)) and even, f"its rows have {list(table)} blocks of {columns} columns"
        )
        yield TYPES[query.dtype]
        yield from self._place(query)
        coding = 0 if step.key_scale is None else _CACHED_CODINGS.get(keys.dtype, 0)
        scaled = (coding > 0) == (step.key_scale is not None) == (step.value_scale is not None)
        require(scaled, f"its attention has keys of {keys.dtype}, of which not all or none have scales")
        for cache in (keys, step.values):
            dtype = keys.dtype if coding else query.dtype
            yield from self._contiguous(cache, dtype, (blocks, kv_heads, columns, dim), _COPIED)
        yield from self._contiguous(step.output, query.dtype, (rows, tokens, heads, dim))
        yield from self._contiguous(step.blocks, "int32", table)
        yield from self._contiguous(step.positions, "int32", (rows, tokens))
        yield from self._contiguous(step.sinks, "float32", (heads,))
        width = -(-columns * per_row // SOFTMAX_BLOCK) * SOFTMAX_BLOCK
        yield from self._contiguous(step.column_bias, "float32", (heads, width))
        for scale in (step.key_scale, step.value_scale):
            yield from self._contiguous(scale, "float32", (blocks, kv_heads, columns, 1))
        yield from (
            coding,
            rows,
            heads,
            tokens,
            dim,
            kv_heads,
            columns,
            blocks,
            per_row,
            width,
            step.window,
            *query.strides[:3],
        )
        yield from (float_bits(step.scaling), float_bits(step.softcap))

    def select(self, step: Select) -> Iterator[int]:
        source, index, dim = step.source, step.index, step.dim
        require(0 <= dim < len(source.shape) and index.dtype in ("int32", "int64"), "it selects from no dimension")
        before, size, after = source.shape[:dim], source.shape[dim], source.shape[dim + 1 :]
        yield TYPES[index.dtype]
        yield from self._contiguous(source, source.dtype, source.shape, _COPIED)
        yield from self._contiguous(step.output, source.dtype, (*before, *index.shape, *after), _COPIED)
        yield from self._contiguous(index, index.dtype, index.shape)
        yield from (
            math.prod(before),
            size,
            math.prod(index.shape),
            math.prod(after) * _COPIED[source.dtype],
            step.wraps,
        )

    def write_cache(self, step: WriteCache) -> Iterator[int]:
        cache, states = step.cache, step.states
        form = len(cache.shape) == 4 and len(states.shape) == 3 and cache.dtype == states.dtype
        require(form, "it writes what is no cache")
        blocks, heads, length, dim = cache.shape
        tokens = states.shape[0]
        fits = states.shape[1:] == (heads, dim) and (states.strides[2] == 1 or dim == 1)
        require(fits, f"it writes {list(states.shape)} to a cache {list(cache.shape)}")
        yield from self._contiguous(cache, cache.dtype, cache.shape)
        size = SIZES[cache.dtype]
        yield from self._place(states)
        for indices in (step.blocks, step.columns):
            yield from self._contiguous(indices, "int32", (tokens,))
        yield from (blocks, heads, length, dim * size, tokens, states.strides[0] * size, states.strides[1] * size)

    def write_codes(self, step: WriteCodes) -> Iterator[int]:
        codes, states = step.codes, step.states
        form = len(codes.shape) == 4 and len(states.shape) == 3 and codes.dtype in _CACHED_CODINGS
        require(form and states.dtype in _FLOATS, "it writes codes to what is no cache of them")
        blocks, heads, length, dim = codes.shape
        tokens = states.shape[0]
        fits = states.shape[1:] == (heads, dim) and (states.strides[2] == 1 or dim == 1)
        require(fits, f"it writes {list(states.shape)} to a cache {list(codes.shape)}")
        yield TYPES[states.dtype]
        yield from self._contiguous(codes, codes.dtype, codes.shape, _COPIED)
        yield from self._contiguous(step.scale, "float32", (blocks, heads, length, 1))
        yield from self._place(states)
        for indices in (step.blocks, step.columns):
            yield from self._contiguous(indices, "int32", (tokens,))
        yield from (_CACHED_CODINGS[codes.dtype], blocks, heads, length, dim, tokens, *states.strides[:2])

    def sample(self, step: Sample) -> Iterator[int]:
        logits = step.logits
        form = logits.dtype == "float32" and len(logits.shape) == 2 and logits.strides[1] == 1
        require(form, "it samples from what are no rows of logits")
        rows, vocab = logits.shape
        yield from self._place(logits)
        yield from self._contiguous(step.params, "float32", (rows, _SAMPLING_PARAMS))
        yield from self._contiguous(step.uniforms, "float32", (rows,))
        yield from self._contiguous(step.output, "int32", (rows,))
        yield from (rows, vocab, logits.strides[0])

    def walk(self, step: Walk) -> Iterator[int]:
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
            yield from self._contiguous(keys, "float32", (tokens, key_heads, key_dim))
        yield from self._contiguous(step.value, "float32", (tokens, heads, value_dim))
        yield from self._contiguous(step.decay, "float32", (tokens, heads, decays))
        yield from self._contiguous(step.share, "float32", (tokens, heads))
        yield from self._contiguous(step.rates, "float32", (key_dim, value_dim))
        for indices in (step.slots, step.positions):
            yield from self._contiguous(indices, "int32", (tokens,))
        yield from self._contiguous(step.state, "float32", (slots, heads, key_dim, value_dim))
        yield from self._contiguous(step.output, "float32", (tokens, heads, value_dim))
        yield from (tokens, heads, key_heads, key_dim, value_dim, decays, slots - 1)

    def convolve(self, step: Convolve) -> Iterator[int]:
        inputs, state = step.inputs, step.state
        form = len(inputs.shape) == 2 and len(state.shape) == 3 and inputs.dtype in _FLOATS and 0 not in state.shape
        require(form, "its convolution has no form")
        tokens, channels = inputs.shape
        slots, past, kept = state.shape
        adjacent = inputs.strides[1] == 1 or channels == 1
        require(adjacent and kept == channels, f"its convolution has {channels} channels, and keeps {kept}")
        yield TYPES[inputs.dtype]
        yield from self._place(inputs)
        yield from self._contiguous(step.weight, "float32", (past + 1, channels))
        yield from self._contiguous(step.bias, "float32", (channels,))
        for indices in (step.slots, step.positions):
            yield from self._contiguous(indices, "int32", (tokens,))
        yield from self._contiguous(state, inputs.dtype, (slots, past, channels))
        yield from self._contiguous(step.output, "float32", (tokens, channels))
        yield from (tokens, channels, past, slots - 1, inputs.strides[0])
