# SPDX-License-Identifier: Apache-2.0
"""Attention of every instruction set, over numbers and codes: near float64, a token's bits its own, and nothing unseen counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from coded_reference import KINDS
from kernel_calls import INFINITY, NAN, Kernels, RefusedError, guarded, int32, random, same_bits, with_dtypes
from torch import Tensor

from optimum_neuron.step.attention.cached_attention import attend_cache
from optimum_neuron.step.attention.coded_states import CodedStates, round_states
from optimum_neuron.step.attention.masks import AttentionChunk
from optimum_neuron.step.attention.rows import AttentionCall, AttentionRows
from optimum_neuron.targets.cpu import ops


pytestmark = pytest.mark.usefixtures("torch_with_one_thread")


def attend_exactly(query: Tensor, keys: Tensor, values: Tensor, slots: Tensor | None, *options: Any) -> Tensor:
    """The contract in float64, as transformers has it; what is not finite in the cache must not be seen."""
    positions, scaling, window, softcap, sinks, column_bias = (*options, *(0, 0.0, None, None)[len(options) - 2 :])
    rows, heads, tokens = query.shape[:3]
    chosen = torch.arange(rows) if slots is None else slots
    key, value = (
        cache[chosen].double().nan_to_num(0, 0, 0).repeat_interleave(heads // keys.shape[1], 1)
        for cache in (keys, values)
    )
    columns, last = torch.arange(keys.shape[2]), positions[:, :, None]
    visible = (columns <= last) & (columns > last - (window or columns.numel() + 1))
    scores = query.double() @ key.transpose(2, 3) * scaling
    if softcap:
        scores = (scores / softcap).tanh() * softcap
    if column_bias is not None:
        bias = column_bias.double()
        own = bias[:, positions.clamp(min=0)].transpose(0, 1)
        scores = scores + bias[:, None, : columns.numel()] - own[..., None]
    scores = scores.masked_fill(~visible[:, None], -1e300)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[None, :, None, None].expand(rows, heads, tokens, 1)], -1)
    weights = scores.softmax(-1)[..., : columns.numel()]
    return ((weights @ value) * visible.any(2)[:, None, :, None]).transpose(1, 2)


def make_cache(
    slots: int, kv_heads: int, columns: int, dims: tuple[int, int], seen: dict[int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys and values with NaN and infinity in every column that `seen` (slot to last position) does not cover."""
    keys, values = (random(slots, kv_heads, columns, dim, dtype=dtype) for dim in dims)
    for slot in range(slots):
        keys[slot, :, seen.get(slot, -1) + 1 :] = NAN
        values[slot, :, seen.get(slot, -1) + 1 :] = NAN if slot % 2 else INFINITY
    return keys, values


def table_of(heads: int, columns: int) -> Tensor:
    """A bias by column as ALiBi's, with zeros to the end of a block of 64."""
    table = torch.zeros(heads, -(-columns // 64) * 64)
    table[:, :columns] = 1.3 * 2.0 ** -torch.arange(1, heads + 1)[:, None] * torch.arange(columns)
    return table


# heads, kv heads, dimensions of keys and of values, columns, window
Shape = tuple[int, int, tuple[int, int], int, int]
SHAPES = [(4, 4, (16, 16), 64, 0), (9, 3, (64, 64), 200, 0), (4, 2, (24, 12), 130, 7), (8, 1, (192, 128), 333, 65)]
SHAPES += [(6, 3, (256, 256), 65, 100)]
# More columns than a section has, which threads share out: of all, and of a window over more than one.
SHAPES += [(6, 2, (32, 32), 3100, 0), (6, 2, (20, 33), 3100, 1500)]
with_shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
# Probabilities are rounded to bfloat16 where the CPU multiplies it.
ATTEND_ERROR = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 5e-6}


@with_dtypes
@with_shapes
@pytest.mark.parametrize(("tokens", "by_slot"), [(1, True), (37, False)])
def test_attend_matches_float64(
    kernels: Kernels, dtype: torch.dtype, shape: Shape, tokens: int, by_slot: bool
) -> None:
    (heads, kv_heads, (dim, value_dim), columns, window), rows, slots = shape, 3, 5
    seq_ids = int32([4, 0, 2]) if by_slot else None
    positions = torch.randint(-1, columns, (rows, tokens), dtype=torch.int32)
    positions[1, 0] = -1
    positions[2, 0] = columns - 1
    if tokens > 9 and columns > 3072:  # at both sides of where sections meet, and of where a window leaves one
        edges = (1023, 1024, 1722, 1723, 2047, 2048, 2523, 2524, 3071, 3072)
        positions[2, 1 : 1 + len(edges)] = int32(edges)
    seen = {int(slot): int(positions[row].max()) for row, slot in enumerate([0, 1, 2] if seq_ids is None else seq_ids)}
    keys, values = make_cache(slots, kv_heads, columns, (dim, value_dim), seen, dtype)
    query = random(rows, tokens, heads, dim, dtype=dtype).transpose(1, 2)
    inputs = (query, keys, values, seq_ids, positions, dim**-0.5, window)
    result = kernels.attend(*inputs)
    assert result.dtype == dtype and result.shape == (rows, tokens, heads, value_dim)
    assert not result[positions < 0].any()
    assert (result.double() - attend_exactly(*inputs)).abs().max() < ATTEND_ERROR[dtype]
    assert same_bits(kernels.attend(query.contiguous(), *inputs[1:]), result)


# A softcap, whether there are sinks and biases by column, and what keys and values are rounded to.
EXTRAS = [(0.7, False, False, None), (30.0, False, False, None), (0.0, True, False, None), (0.0, False, True, None)]
EXTRAS += [(5.0, True, True, None), (5.0, True, True, "int8"), (0.0, False, False, "int8"), (0.0, False, False, "fp8")]
TYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@with_dtypes
@pytest.mark.parametrize("extras", EXTRAS, ids=str)
@pytest.mark.parametrize("sizes", [(6, 3, 150), (6, 1, 64), (3, 3, 1100)], ids=str)
def test_softcap_sinks_biases_and_codes_are_those_of_transformers(
    kernels: Kernels, dtype: torch.dtype, extras: tuple[float, bool, bool, str | None], sizes: tuple[int, int, int]
) -> None:
    (softcap, has_sinks, is_biased, kind), (heads, kv_heads, columns) = extras, sizes
    sinks = torch.tensor([0.0, -3.0, 2.5, 40.0, -100.0, 9.0])[:heads] if has_sinks else None
    table = table_of(heads, columns) if is_biased else None
    positions = torch.randint(-1, columns, (2, 19), dtype=torch.int32)
    positions[:, 3], positions[:, 4] = -1, 0
    last = {row: int(positions[row].max()) for row in range(2)}
    keys, values = make_cache(2, kv_heads, columns, (32, 20), last, dtype)
    seen = keys, values
    if kind:
        keys, values = (round_states(each.float(), TYPES[kind]) for each in seen)
        seen = keys.dequantize(), values.dequantize()
    query = random(2, heads, 19, 32, dtype=dtype) * 3  # capped scores differ from others
    for window in (0, 20):
        inputs = (None, positions, 0.3, window, softcap, sinks, table)
        result = kernels.attend(query, keys, values, *inputs)
        assert not result[positions < 0].any()
        assert (result.double() - attend_exactly(query, *seen, *inputs)).abs().max() < 2 * ATTEND_ERROR[dtype]


@with_dtypes
def test_heads_and_scores_of_any_size_and_sinks_without_weight_are_taken(kernels: Kernels, dtype: torch.dtype) -> None:
    for dim in (1, 2, 15, 16, 17, 48, 80, 120, 255, 256, 511, 512):
        query, dims = random(2, 3, 2, dim, dtype=dtype), (dim, 513 - dim)
        keys, values = make_cache(2, 1, 70, dims, {0: 69, 1: 65}, dtype)
        inputs: Any = (query, keys, values, None, int32([[3, 69], [65, 40]]), dim**-0.5)
        error = (kernels.attend(*inputs).double() - attend_exactly(*inputs)).abs().max()
        assert error < ATTEND_ERROR[dtype], dim
    keys, values = random(1, 1, 100, 16, dtype=dtype), random(1, 1, 100, 16, dtype=dtype)
    query, positions = random(1, 2, 1, 16, dtype=dtype), int32([[99]])
    for scaling in (0.0, 1e-3, 300.0, -300.0):
        inputs = (query, keys, values, None, positions, scaling)
        error = (kernels.attend(*inputs).double() - attend_exactly(*inputs)).abs().max()
        assert error < ATTEND_ERROR[dtype] * max(1, abs(scaling)), scaling
    inputs = (query, keys, values, None, positions, 0.25)
    plain = kernels.attend(*inputs)
    nothing = kernels.attend(*inputs, sinks=torch.tensor([-INFINITY, -1e30]))
    assert (nothing.double() - plain.double()).abs().max() <= ATTEND_ERROR[dtype]


@with_dtypes
@with_shapes
@pytest.mark.parametrize("extras", [False, True])
def test_a_token_of_attend_depends_on_nothing_else(
    kernels: Kernels, dtype: torch.dtype, shape: Shape, extras: bool
) -> None:
    heads, kv_heads, (dim, value_dim), columns, window = shape
    tokens = min(columns, 100) - 3
    options = (dim**-0.5, window, 3.0 if extras else 0.0, torch.randn(heads) if extras else None)

    def attend(query: Tensor, keys: Tensor, values: Tensor, slots: Tensor | None, positions: Tensor) -> Tensor:
        table = table_of(heads, keys.shape[2]) if extras else None
        return kernels.attend(query, keys, values, slots, positions.contiguous(), *options, table)

    positions = torch.arange(columns - tokens, columns, dtype=torch.int32)[None]
    keys, values = make_cache(3, kv_heads, columns, (dim, value_dim), {1: columns - 1}, dtype)
    query = random(1, tokens, heads, dim, dtype=dtype).transpose(1, 2)
    slot = int32([1])
    whole = attend(query, keys, values, slot, positions)
    for size, threads in ((1, 1), (7, 5), (33, 3), (tokens, 1), (tokens, 3)):
        parts = zip(query.split(size, 2), positions.split(size, 1), strict=True)
        with kernels.with_threads(threads):
            assert same_bits(torch.cat([attend(part, keys, values, slot, where) for part, where in parts], 1), whole)
    # As rows of one token, as in decoding, with an idle row among them.
    alone, idle = query.permute(2, 1, 0, 3), torch.where(torch.arange(tokens) == 5, -1, positions[0])[:, None]
    with kernels.with_threads(3):
        decoded = attend(alone, keys, values, slot.expand(tokens).contiguous(), idle.int())
    assert not decoded[5].any()
    decoded[5] = whole[0, 5]
    assert same_bits(decoded[:, 0], whole[0])
    # The same columns in a smaller cache, after which and before whose window there is poison.
    stop = columns // 2 + 1
    first = max(0, stop - window) if window else 0
    for poison in (NAN, INFINITY, -INFINITY):
        small = [torch.full((1, kv_heads, stop + 9, size), poison, dtype=dtype) for size in (dim, value_dim)]
        for own, cache in zip(small, (keys, values), strict=True):
            own[0, :, first:stop] = cache[1, :, first:stop]
        among = torch.randint(-1, stop + 9, (1, 5), dtype=torch.int32)
        among[0, 3] = stop - 1
        results = attend(query[:, :, :5], *small, None, among)
        same = attend(query[:, :, 3:4], keys, values, slot, int32([[stop - 1]]))
        assert same_bits(results[0, 3], same[0, 0]) and same.isfinite().all()


@with_dtypes
def test_attend_shows_what_a_token_sees(kernels: Kernels, dtype: torch.dtype) -> None:
    query, window = random(1, 2, 1, 16, dtype=dtype), 1500
    for last, columns in ((69, (0, 63, 69)), (3099, (1024, 1599, 1600, 2500, 3099))):
        keys = random(2, 1, last + 1, 16, dtype=dtype)
        clean = kernels.attend(query, keys, keys, int32([1]), int32([[last]]), 0.25, window)
        for column in columns:
            poisoned = keys.clone()
            poisoned[1, :, column] = NAN
            for pair in ((poisoned, keys), (keys, poisoned)):
                found = kernels.attend(query, *pair, int32([1]), int32([[last]]), 0.25, window)
                assert found.isnan().all() if column > last - window else same_bits(found, clean)
                assert kernels.attend(query, *pair, int32([0]), int32([[last]]), 0.25).isfinite().all()


def test_slots_and_positions_that_are_not_there_are_refused(kernels: Kernels) -> None:
    query, keys = random(2, 2, 1, 16, dtype=torch.float32), random(2, 1, 70, 16, dtype=torch.float32)
    for slot, position in ((2, 0), (-1, 0), (0, 70), (0, -2), (0, 2**31 - 1), (-(2**31), 5)):
        output = guarded((2, 1, 2, 16), torch.float32)
        output.fill_(7)
        with pytest.raises(RefusedError):
            kernels.attend(query, keys, keys, int32([1, slot]), int32([[3], [position]]), 0.25, output=output)
        assert (output == 7).all()


def test_attention_within_blocks_of_positions_is_left_to_the_reference() -> None:
    query, keys, values = random(2, 4, 1, 16, dtype=torch.float32), *torch.randn(2, 3, 2, 32, 16)
    rows = AttentionRows(int32([[9], [30]]), None, 32)
    call = AttentionCall(0, query, keys, values, 0.25, AttentionChunk(8), None, None)
    assert not ops.is_taken(call, keys, values)
    found = ops.OPS.attend_cache(call, rows, query, keys, values)
    assert torch.equal(found, attend_cache(call, rows, query, keys, values))


HEADS, KV_HEADS, DIM = 6, 2, 48
with_kinds = pytest.mark.parametrize("kind", KINDS)


def bytes_of(codes: Tensor) -> Tensor:
    return codes.contiguous().view(torch.uint8)


@with_kinds
@with_dtypes
@pytest.mark.parametrize("dim", [5, 48])
def test_what_is_written_are_the_codes_and_scales_of_the_rule(
    kernels: Kernels, dtype: torch.dtype, kind: str, dim: int
) -> None:
    """Sizes from subnormal to large, ties, zeros, and what is not finite."""
    states = random(9, 2, dim, dtype=torch.float32) * torch.logspace(-6, 4, 9)[:, None, None]
    states[1, 0], states[2, 1] = torch.linspace(-127, 127, dim) * 0.5, 0.0
    states[1, 0, 0], states[3, 0, 4], states[4, 1, 1], states[5, 0] = 127.0, NAN, -INFINITY, 1e-38
    states = states.to(dtype)
    codes, scale = guarded((4, 2, 7, dim), TYPES[kind]), guarded((4, 2, 7, 1), torch.float32)
    codes.view(torch.uint8).fill_(1)
    scale.fill_(3.0)
    rows, columns = int32([0, 1, 3, 3, 2, 2, 0, 1, 3]), int32([0, 6, 1, 2, 3, 4, 5, 0, 6])
    kernels.write_codes(CodedStates(codes, scale), states.transpose(0, 1).contiguous().transpose(0, 1), rows, columns)
    expected = round_states(states, TYPES[kind])
    found = CodedStates(codes, scale)[rows.long(), :, columns.long()]
    assert torch.equal(bytes_of(found.codes), bytes_of(expected.codes)) and same_bits(found.scale, expected.scale)
    written = torch.zeros(4, 7, dtype=torch.bool)
    written[rows.long(), columns.long()] = True
    others = ~written[:, None].expand(4, 2, 7)
    assert (codes.view(torch.uint8)[others] == 1).all() and (scale[others] == 3).all()


def coded(rows: int, columns: int, kind: str, seen: int) -> tuple[CodedStates, CodedStates]:
    """Keys and values, of which those from column `seen` on have scales that are NaN."""
    states = random(2, rows, KV_HEADS, columns, DIM, dtype=torch.float32) * 3
    states[:, :, :, seen:] = NAN
    return round_states(states[0], TYPES[kind]), round_states(states[1], TYPES[kind])


@with_kinds
@with_dtypes
def test_a_token_depends_on_the_codes_that_it_sees_alone(kernels: Kernels, dtype: torch.dtype, kind: str) -> None:
    """Cut otherwise, in blocks, by more threads, and beside broken columns that it does not see."""
    columns, tokens, slot = 1216, 40, int32([1])
    keys, values = coded(2, columns, kind, columns)
    positions = torch.arange(columns - tokens, columns, dtype=torch.int32)[None]
    query = random(1, HEADS, tokens, DIM, dtype=dtype)
    whole = kernels.attend(query, keys, values, slot, positions, 0.1)
    with kernels.with_threads(3):
        assert same_bits(kernels.attend(query, keys, values, slot, positions, 0.1), whole)
    for first, stop in ((0, 1), (39, 40), (3, 20)):
        part, broken = positions[:, first:stop].contiguous(), []
        for each in (keys, values):
            scale = each.scale.clone()
            scale[1, :, columns - tokens + stop :] = NAN
            broken.append(CodedStates(each.codes, scale))
        found = kernels.attend(query[:, :, first:stop], *broken, slot, part, 0.1)
        assert same_bits(found[0], whole[0, first:stop])
    table = int32([list(range(18, -1, -1))])
    assert same_bits(kernels.attend(query, in_blocks(keys), in_blocks(values), table, positions, 0.1), whole)


def in_blocks(states: CodedStates) -> CodedStates:
    """Row 1 in blocks of 64, the last one first."""
    parts = (states.codes.view(torch.int8), states.scale)
    codes, scale = (each[1].unflatten(1, (-1, 64)).transpose(0, 1).flip(0).contiguous() for each in parts)
    return CodedStates(codes.view(states.codes.dtype), scale)


@with_kinds
def test_codes_show_what_a_token_sees_and_where_none_are_is_refused(best_kernels: Kernels, kind: str) -> None:
    keys, values = coded(1, 64, kind, 30)
    query = random(2, HEADS, 1, DIM, dtype=torch.bfloat16)
    found = best_kernels.attend(query, keys, values, int32([0, 0]), int32([[30], [-1]]), 0.1)
    assert found[0].isnan().all() and not found[1].any()
    states = random(1, KV_HEADS, DIM, dtype=torch.float32)
    for row, column in ((1, 0), (0, 64), (-1, 0)):
        with pytest.raises(RefusedError):
            best_kernels.write_codes(keys, states, int32([row]), int32([column]))
