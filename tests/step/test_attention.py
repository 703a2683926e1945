# SPDX-License-Identifier: Apache-2.0
"""Attention over caches that hold anything, and what a token sees of compressed keys."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from optimum_neuron.step.attention import kv_cache
from optimum_neuron.step.attention.cached_attention import attend_cache
from optimum_neuron.step.attention.masks import AttentionChunk, Window
from optimum_neuron.step.attention.rows import AttentionCall, AttentionRows, visible_groups
from optimum_neuron.targets.neuron.operators import attention as neuron


ROWS, HEADS, DIM = 3, 2, 8


@given(st.integers(1, 9), st.integers(-1, 60))
def test_a_token_sees_the_groups_that_end_at_or_before_it(ratio: int, position: int) -> None:
    mask = visible_groups(torch.tensor([[position]]), ratio, 70)[0, 0]
    assert mask.tolist() == [(group + 1) * ratio - 1 <= position for group in range(70)]


COLUMNS = 40
KINDS: dict[str, dict] = {
    "plain": {},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "column bias": {"column_bias": torch.linspace(0.1, 1.5, 4)[:, None] * torch.arange(COLUMNS)},
}


def in_blocks(attend: Callable) -> Callable:
    """The same attention, of so few scores at a time that it takes a token and eight columns of each row."""

    def attend_in_blocks(*arguments: object) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(neuron, "COLUMNS", 8)
            patch.setattr(neuron, "SCORES_LIMIT", 4 * 8 * 16)
            output: Tensor = attend(*arguments)
        return output

    return attend_in_blocks


with_attention = [
    pytest.mark.parametrize(
        "attention",
        [attend_cache, neuron.attend_cache, in_blocks(neuron.attend_cache)],
        ids=["reference", "neuron", "blocks"],
    ),
    pytest.mark.parametrize("kind", KINDS),
    pytest.mark.parametrize("window", [None, 6, AttentionChunk(8)], ids=["all", "window", "block"]),
    pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str),
    pytest.mark.parametrize("value_dim", [16, 12]),
]


def with_all_attention(test: Callable) -> Callable:
    for mark in with_attention:
        test = mark(test)
    return test


class Layer:
    """A layer's cache of four slots and the trash row, and chunk rows that read three of them; the last row is idle."""

    def __init__(self, kind: str, window: Window, dtype: torch.dtype, value_dim: int) -> None:
        self.query = torch.randn(4, 4, 7, 16).to(dtype)
        self.keys, self.values = (torch.randn(5, 2, COLUMNS, dim).to(dtype) for dim in (16, value_dim))
        # A long prompt, the row behind it in the same slot, a prompt's beginning with padding.
        starts = [[*range(20, 27)], [*range(27, 34)], [0, 1, 2, 2, 2, 2, 2], [-1] * 7]
        rows = torch.tensor(starts, dtype=torch.int32), torch.tensor([3, 3, 1, 0], dtype=torch.int32)
        self.group = AttentionRows(*rows, COLUMNS)
        self.visible = self.group.visible(window)
        options: dict = {"softcap": None, "sinks": None} | KINDS[kind]
        self.call = AttentionCall(0, self.query, self.keys, self.values, 0.25, window, **options)

    def attend(self, attention: Callable, keys: Tensor, values: Tensor) -> Tensor:
        output: Tensor = attention(self.call, self.group, self.query, keys, values)
        return output


@with_all_attention
def test_a_column_that_a_row_does_not_see_may_hold_anything(
    attention: Callable, kind: str, window: Window, dtype: torch.dtype, value_dim: int
) -> None:
    layer = Layer(kind, window, dtype, value_dim)
    expected = layer.attend(attention, layer.keys, layer.values)
    seen = torch.zeros(5, COLUMNS, dtype=torch.bool)
    for row, slot in enumerate([3, 3, 1]):
        seen[slot] |= layer.visible[row].any(0)
    assert expected.isfinite().all()
    largest = torch.finfo(dtype).max
    for canary in (math.nan, math.inf, -math.inf, largest, -largest):
        keys, values = (torch.where(seen[:, None, :, None], each, canary) for each in (layer.keys, layer.values))
        found = layer.attend(attention, keys, values)
        assert torch.equal(found[:3], expected[:3])
        assert found.isfinite().all()


@with_all_attention
def test_a_broken_token_reaches_those_who_see_it_alone(
    attention: Callable, kind: str, window: Window, dtype: torch.dtype, value_dim: int
) -> None:
    layer = Layer(kind, window, dtype, value_dim)
    expected = layer.attend(attention, layer.keys, layer.values)
    slots = [3, 3, 1, 0]
    for slot, column in ((3, 17), (3, 24), (3, 33), (1, 1)):
        for broken in (math.nan, -math.inf):
            for part in range(2):  # one number of its keys, or of its values
                states = [each.clone() for each in (layer.keys, layer.values)]
                token = [each[slot, None, :, column].clone() for each in states]
                token[part][0, 1, 3] = broken
                for each, whole in zip(states, kv_cache.whole_or_nan(*token), strict=True):
                    each[slot, :, column] = whole[0]
                found = layer.attend(attention, *states)
                sees = layer.visible[:, :, column] & (torch.tensor(slots) == slot)[:, None]
                assert found[sees].isnan().all()
                assert torch.equal(found[~sees], expected[~sees])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_is_written_of_a_token_is_finite_or_nan_throughout(dtype: torch.dtype) -> None:
    key, value = torch.randn(6, 2, 16).to(dtype), torch.randn(6, 2, 12).to(dtype)
    key[0, 1, 3], key[5, 0, 0] = torch.finfo(dtype).max, -0.0  # large, and a zero with a sign, are nothing special
    for kept, written in zip((key, value), kv_cache.whole_or_nan(key, value), strict=True):
        assert torch.equal(kept, written) and torch.equal(kept.signbit(), written.signbit())
    key[1, 1, 3], key[2, 0, 0], value[3, 1, 11], value[4, 0, 2] = math.nan, math.inf, -math.inf, math.nan
    value[4, 0, 3], value[4, 1, 3] = math.inf, -math.inf
    for kept, written in zip((key, value), kv_cache.whole_or_nan(key, value), strict=True):
        assert written[1:5].isnan().all() and torch.equal(written[[0, 5]], kept[[0, 5]])


def tolerance(dtype: torch.dtype) -> float:
    return 1e-5 if dtype == torch.float32 else 0.05 if dtype == torch.bfloat16 else 0.01


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [None, 6, AttentionChunk(8)], ids=["all", "window", "block"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_attention_in_blocks_equals_the_reference(kind: str, window: Window, dtype: torch.dtype) -> None:
    layer = Layer(kind, window, dtype, 12)
    expected = layer.attend(attend_cache, layer.keys, layer.values)[:3]
    for attention in (neuron.attend_cache, in_blocks(neuron.attend_cache)):
        found = layer.attend(attention, layer.keys, layer.values)[:3]
        torch.testing.assert_close(found, expected, atol=tolerance(dtype), rtol=tolerance(dtype))


@pytest.mark.parametrize(
    ("heads", "tokens", "columns", "expected"),
    [
        (4, 1, 4096, (1, 4096)),
        (4, 512, 4096, (512, 1024)),
        (4, 2048, 4096, (1024, 512)),
        (32, 2048, 32768, (128, 512)),
        (32, 1000, 600, (125, 512)),
        (128, 1, 32768, (1, 16384)),
    ],
)
def test_scores_of_a_block_keep_to_the_limit(heads: int, tokens: int, columns: int, expected: tuple[int, int]) -> None:
    length, width = neuron.score_block(heads, tokens, columns)
    assert (length, width) == expected
    assert 4 * heads * length * width <= neuron.SCORES_LIMIT == 8 << 20 and tokens % length == 0


class Decode:
    """A layer's cache of four slots and the trash row, a token that is not yet in it for each slot; the last one is idle."""

    def __init__(self, kind: str, window: Window, dtype: torch.dtype, value_dim: int) -> None:
        positions = [25, 0, COLUMNS - 1, -1]
        self.query = torch.randn(4, 4, 1, 16).to(dtype)
        self.cache = [torch.randn(5, 2, COLUMNS, dim).to(dtype) for dim in (16, value_dim)]
        self.own = [torch.randn(4, 2, dim).to(dtype) for dim in (16, value_dim)]
        self.positions = torch.tensor(positions, dtype=torch.int32)
        self.group = AttentionRows(self.positions[:, None], None, COLUMNS)
        options: dict = {"softcap": None, "sinks": None} | KINDS[kind]
        self.call = AttentionCall(0, self.query, *self.own, 0.25, window, **options)
        # Without its own column: what the step writes there, it does not read.
        columns = torch.arange(COLUMNS)
        self.earlier = self.group.visible(window)[:, 0] & (columns < self.positions[:, None])

    def written(self) -> list[Tensor]:
        written = [each.clone() for each in self.cache]
        for each, own in zip(written, self.own, strict=True):
            for row in range(3):
                each[row, :, self.positions[row]] = own[row]
        return written

    def reference(self) -> Tensor:
        return attend_cache(self.call, self.group, self.query, *self.written())

    def attend(self, attention: Callable, cache: list[Tensor], own: list[Tensor]) -> Tensor:
        output: Tensor = attention(self.call, self.group, self.query, *cache, *own)
        return output


def with_decode(test: Callable) -> Callable:
    decode = [neuron.attend_decode, in_blocks(neuron.attend_decode)]
    for mark in (pytest.mark.parametrize("attention", decode, ids=["neuron", "blocks"]), *with_attention[1:]):
        test = mark(test)
    return test


@with_decode
def test_decode_rows_need_nothing_of_what_the_step_writes(
    attention: Callable, kind: str, window: Window, dtype: torch.dtype, value_dim: int
) -> None:
    layer = Decode(kind, window, dtype, value_dim)
    found = layer.attend(attention, layer.cache, layer.own)
    torch.testing.assert_close(found[:3], layer.reference()[:3], atol=tolerance(dtype), rtol=tolerance(dtype))
    for canary in (math.nan, math.inf, -math.inf, torch.finfo(dtype).max):
        kept = torch.cat([layer.earlier, torch.zeros(1, COLUMNS, dtype=torch.bool)])[:, None, :, None]
        unseen = [torch.where(kept, each, canary) for each in layer.cache]
        again = layer.attend(attention, unseen, layer.own)
        assert torch.equal(again, found) and found.isfinite().all()


@with_decode
def test_a_broken_token_reaches_the_decode_rows_that_see_it_alone(
    attention: Callable, kind: str, window: Window, dtype: torch.dtype, value_dim: int
) -> None:
    layer = Decode(kind, window, dtype, value_dim)
    expected = layer.attend(attention, layer.cache, layer.own)
    for row in range(3):  # its own token
        own = [each.clone() for each in layer.own]
        for each in own:
            each[row] = math.nan
        found = layer.attend(attention, layer.cache, own)
        others = torch.arange(4) != row
        assert found[row].isnan().all() and torch.equal(found[others], expected[others])
    for row, column in ((0, 24), (0, 10), (2, 38)):
        cache = [each.clone() for each in layer.cache]
        for each in cache:
            each[row, :, column] = math.nan
        found = layer.attend(attention, cache, layer.own)
        others = torch.arange(4) != row
        assert found[row].isnan().all() == layer.earlier[row, column]
        assert torch.equal(found[others], expected[others])
