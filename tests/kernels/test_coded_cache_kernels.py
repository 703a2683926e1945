# SPDX-License-Identifier: Apache-2.0
"""Keys and values as codes in the kernels of every instruction set: exact, a token's bits its own, and nothing unseen counts."""

from __future__ import annotations

import pytest
import torch
from coded_reference import KINDS
from kernel_calls import Kernels, RefusedError, guarded, int32, random, same_bits, threads, with_dtypes
from test_kernels import ATTEND_ERROR, attend_exactly
from torch import Tensor

from optimum_neuron.kernels.steps.access import PlanError
from optimum_neuron.step.attention.coded_states import CodedStates, round_states


pytestmark = pytest.mark.usefixtures("torch_with_one_thread")
TYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
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
    states[1, 0] = torch.linspace(-127, 127, dim) * 0.5
    states[1, 0, 0] = 127.0
    states[2, 1] = 0.0
    states[3, 0, 4], states[4, 1, 1], states[5, 0] = float("nan"), float("-inf"), 1e-38
    states = states.to(dtype)
    codes, scale = guarded((4, 2, 7, dim), TYPES[kind]), guarded((4, 2, 7, 1), torch.float32)
    bytes_of(codes).fill_(1)
    codes.view(torch.uint8).fill_(1)
    scale.fill_(3.0)
    rows, columns = int32([0, 1, 3, 3, 2, 2, 0, 1, 3]), int32([0, 6, 1, 2, 3, 4, 5, 0, 6])
    kernels.write_codes(codes, scale, states.transpose(0, 1).contiguous().transpose(0, 1), rows, columns)
    expected = round_states(states, TYPES[kind])
    found = CodedStates(codes, scale)[rows.long(), :, columns.long()]
    assert torch.equal(bytes_of(found.codes), bytes_of(expected.codes)) and same_bits(found.scale, expected.scale)
    written = torch.zeros(4, 7, dtype=torch.bool)
    written[rows.long(), columns.long()] = True
    others = ~written[:, None].expand(4, 2, 7)
    assert (codes.view(torch.uint8)[others] == 1).all() and (scale[others] == 3).all()


def coded(rows: int, columns: int, kind: str, seen: int) -> tuple[CodedStates, CodedStates]:
    """Keys and values, of which those from column `seen` on have scales that are NaN."""
    made = []
    for _ in range(2):
        states = random(rows, KV_HEADS, columns, DIM, dtype=torch.float32)
        states[:, :, seen:] = float("nan")
        made.append(round_states(states * 3, TYPES[kind]))
    return made[0], made[1]


def attend(
    kernels: Kernels, query: Tensor, keys: CodedStates, values: CodedStates, *options: object, **more: Tensor
) -> Tensor:
    return kernels.attend(query, keys.codes, values.codes, *options, scales=(keys.scale, values.scale), **more)


@with_kinds
@with_dtypes
@pytest.mark.parametrize(("columns", "extras"), [(100, False), (100, True), (1100, False)])
def test_attention_over_codes_is_exact(
    kernels: Kernels, dtype: torch.dtype, kind: str, columns: int, extras: bool
) -> None:
    window, softcap, sinks = (37, 4.0, torch.randn(HEADS)) if extras else (0, 0.0, None)
    last = columns - 3
    positions = int32([[0, 1, last // 2, last - 1, last]])
    keys, values = coded(2, columns, kind, last + 1)
    query = random(1, HEADS, 5, DIM, dtype=dtype)
    found = attend(kernels, query, keys, values, int32([1]), positions, 0.1, window, softcap, sinks)
    whole = (each.dequantize() for each in (keys, values))
    expected = attend_exactly(query, *whole, int32([1]), positions, 0.1, window, softcap, sinks)
    assert (found.double() - expected).abs().max() < 6 * ATTEND_ERROR[dtype]


@with_kinds
@with_dtypes
def test_a_token_depends_on_what_it_sees_alone(kernels: Kernels, dtype: torch.dtype, kind: str) -> None:
    """Cut otherwise, in blocks, by more threads, and beside broken columns that it does not see."""
    columns, tokens = 1216, 40
    keys, values = coded(2, columns, kind, columns)
    positions = torch.arange(columns - tokens, columns, dtype=torch.int32)[None]
    query = random(1, HEADS, tokens, DIM, dtype=dtype)
    whole = attend(kernels, query, keys, values, int32([1]), positions, 0.1)
    with threads(3):
        assert same_bits(attend(kernels, query, keys, values, int32([1]), positions, 0.1), whole)
    for first, stop in ((0, 1), (39, 40), (3, 20)):
        part, broken = positions[:, first:stop].contiguous(), []
        for each in (keys, values):
            scale = each.scale.clone()
            scale[1, :, columns - tokens + stop :] = float("nan")
            broken.append(CodedStates(each.codes, scale))
        found = attend(kernels, query[:, :, first:stop], broken[0], broken[1], int32([1]), part, 0.1)
        assert same_bits(found[0], whole[0, first:stop])
    paged, table = [in_blocks(each) for each in (keys, values)], int32([list(range(18, -1, -1))])
    assert same_bits(attend(kernels, query, paged[0], paged[1], table, positions, 0.1), whole)


def in_blocks(states: CodedStates) -> CodedStates:
    """Row 1 in blocks of 64, the last one first."""
    parts = (states.codes.view(torch.int8), states.scale)
    codes, scale = (each[1].unflatten(1, (-1, 64)).transpose(0, 1).flip(0).contiguous() for each in parts)
    return CodedStates(codes.view(states.codes.dtype), scale)


@with_kinds
def test_who_sees_a_broken_column_is_nan_and_an_idle_row_zero(best_kernels: Kernels, kind: str) -> None:
    keys, values = coded(1, 64, kind, 30)
    query = random(2, HEADS, 1, DIM, dtype=torch.bfloat16)
    found = attend(best_kernels, query, keys, values, int32([0, 0]), int32([[30], [-1]]), 0.1)
    assert found[0].isnan().all() and not found[1].any()


def test_caches_that_do_not_fit_are_refused(best_kernels: Kernels) -> None:
    keys, values = coded(1, 64, "int8", 64)
    query, options = random(1, HEADS, 1, DIM, dtype=torch.float32), (None, int32([[9]]), 0.1)
    wrong = [
        (keys.codes, values.codes, None),
        (keys.codes, values.codes, (keys.scale, values.scale[:, :1].contiguous())),
        (keys.codes, values.codes.view(torch.float8_e4m3fn), (keys.scale, values.scale)),
        (keys.scale * 1.0, values.codes, (keys.scale, values.scale)),
    ]
    for key, value, scales in wrong:
        with pytest.raises(PlanError):
            best_kernels.attend(query, key, value, *options, scales=scales)
    states = random(1, KV_HEADS, DIM, dtype=torch.float32)
    for row, column in ((1, 0), (0, 64), (-1, 0)):
        with pytest.raises(RefusedError):
            best_kernels.write_codes(keys.codes, keys.scale, states, int32([row]), int32([column]))
    with pytest.raises(PlanError):
        best_kernels.write_codes(keys.codes, keys.scale, states[:, :1].contiguous(), int32([0]), int32([0]))
