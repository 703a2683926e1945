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
from optimum_neuron.step.attention.coded_states import round_states
from optimum_neuron.step.attention.masks import AttentionChunk, Window
from optimum_neuron.step.attention.rows import AttentionCall, AttentionRows, visible_groups
from optimum_neuron.targets.neuron.operators import attention as neuron


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


ATTENTION: dict[str, Callable] = {
    "reference": attend_cache,
    "neuron": neuron.attend_cache,
    "blocks": in_blocks(neuron.attend_cache),
    "decode": neuron.attend_decode,
    "decode in blocks": in_blocks(neuron.attend_decode),
}
with_layers = [
    pytest.mark.parametrize("name", ATTENTION),
    pytest.mark.parametrize("kind", KINDS),
    pytest.mark.parametrize("window", [None, 6, AttentionChunk(8)], ids=["all", "window", "block"]),
    pytest.mark.parametrize(
        ("dtype", "value_dim"), [(torch.float32, 16), (torch.bfloat16, 12), (torch.float16, 12)], ids=str
    ),
]


def with_all_attention(test: Callable) -> Callable:
    for mark in with_layers:
        test = mark(test)
    return test


class Layer:
    """A layer's cache of four slots and the trash row, and rows that read it; the last row is idle.

    Chunk rows read three slots. Decode rows bring a token that is not yet in the cache of their slot.
    """

    def __init__(self, name: str, kind: str, window: Window, dtype: torch.dtype, value_dim: int) -> None:
        decode, dims = name.startswith("decode"), (16, value_dim)
        # A long prompt, the row behind it in the same slot, a prompt's beginning with padding.
        starts = [[*range(20, 27)], [*range(27, 34)], [0, 1, 2, 2, 2, 2, 2], [-1] * 7]
        positions = torch.tensor([[25], [0], [COLUMNS - 1], [-1]] if decode else starts, dtype=torch.int32)
        self.slots = torch.arange(4) if decode else torch.tensor([3, 3, 1, 0])
        self.query = torch.randn(4, 4, positions.shape[1], 16).to(dtype)
        self.cache = [torch.randn(5, 2, COLUMNS, dim).to(dtype) for dim in dims]
        self.own = [torch.randn(4, 2, dim).to(dtype) for dim in dims] if decode else []
        self.positions, self.attention = positions, ATTENTION[name]
        self.group = AttentionRows(positions, None if decode else self.slots.int(), COLUMNS)
        self.visible = self.group.visible(window)
        # What a step writes for decode rows, they do not read.
        self.read = self.visible & (torch.arange(COLUMNS) < positions[..., None]) if decode else self.visible
        options: dict = {"softcap": None, "sinks": None} | KINDS[kind]
        self.call = AttentionCall(0, self.query, *(self.own or self.cache), 0.25, window, **options)

    def attend(self, cache: list | None = None, own: list[Tensor] | None = None) -> Tensor:
        states = *(cache or self.cache), *(own or self.own)
        output: Tensor = self.attention(self.call, self.group, self.query, *states)
        return output

    def hide(self, canary: float) -> list[Tensor]:
        """The cache with a canary in what no row reads."""
        read = torch.zeros(5, COLUMNS, dtype=torch.bool)
        for row, slot in enumerate(self.slots[:3]):
            read[slot] |= self.read[row].any(0)
        return [torch.where(read[:, None, :, None], each, canary) for each in self.cache]

    def attend_exactly(self, cache: list[Tensor]) -> Tensor:
        """Attend in float64; `[rows, tokens, heads, dim]` of the rows that are not idle."""
        states = [each[self.slots].double() for each in cache]
        for each, own in zip(states, self.own, strict=False):
            for row in range(3):
                each[row, :, self.positions[row, 0]] = own[row].double()
        keys, values = (each.repeat_interleave(2, 1) for each in states)
        scores = self.query.double() @ keys.mT * 0.25
        if self.call.softcap is not None:
            scores = torch.tanh(scores / self.call.softcap) * self.call.softcap
        if self.call.column_bias is not None:
            scores = scores + self.call.column_bias[None, :, None]
        scores = scores.masked_fill(~self.visible[:, None], -torch.inf)
        sinks = torch.tensor(-torch.inf) if self.call.sinks is None else self.call.sinks[:, None, None]
        scores = torch.cat([scores, sinks.double().expand(*scores.shape[:3], 1)], -1)
        return (scores.softmax(-1)[..., :-1] @ values).transpose(1, 2)[:3]


@with_all_attention
def test_what_a_row_sees_is_attended_to_and_what_it_does_not_see_may_be_anything(
    name: str, kind: str, window: Window, dtype: torch.dtype, value_dim: int
) -> None:
    layer = Layer(name, kind, window, dtype, value_dim)
    found, largest = layer.attend(), torch.finfo(dtype).max
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}[dtype]
    expected = layer.attend_exactly(layer.cache).to(dtype)
    torch.testing.assert_close(found[:3], expected, atol=tolerance, rtol=tolerance)
    for canary in (math.nan, math.inf, -math.inf, largest, -largest):
        again = layer.attend(layer.hide(canary))
        assert torch.equal(again[:3], found[:3]) and again.isfinite().all()


@with_all_attention
def test_a_broken_token_reaches_those_who_see_it_alone(
    name: str, kind: str, window: Window, dtype: torch.dtype, value_dim: int
) -> None:
    layer = Layer(name, kind, window, dtype, value_dim)
    expected = layer.attend()
    for slot, column in ((0, 24), (0, 10), (2, 38)) if layer.own else ((3, 17), (3, 24), (3, 33), (1, 1)):
        for broken in (math.nan, -math.inf):
            for part in range(2):  # one number of its keys, or of its values
                states = [each.clone() for each in layer.cache]
                token = [each[slot, None, :, column].clone() for each in states]
                token[part][0, 1, 3] = broken
                for each, whole in zip(states, kv_cache.whole_or_nan(*token), strict=True):
                    each[slot, :, column] = whole[0]
                found = layer.attend(states)
                sees = layer.read[:, :, column] & (layer.slots == slot)[:, None]
                assert found[sees].isnan().all()
                assert torch.equal(found[~sees], expected[~sees])
    for row in range(3) if layer.own else ():
        own, others = [each.clone() for each in layer.own], torch.arange(4) != row
        for each in own:
            each[row] = math.nan
        found = layer.attend(own=own)
        assert found[row].isnan().all() and torch.equal(found[others], expected[others])


@pytest.mark.parametrize("codes", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_attention_over_codes_is_attention_over_what_they_stand_for(
    codes: torch.dtype, dtype: torch.dtype, kind: str
) -> None:
    """Large numbers would leave float16."""
    layer = Layer("reference", kind, 6, dtype, 12)
    layer.query /= 16
    layer.cache = [each.float() * 60 for each in layer.cache]
    coded = [round_states(each, codes) for each in layer.hide(math.nan)]
    found, tolerance = layer.attend(coded), 1e-5 if dtype == torch.float32 else 1e-3
    assert found.dtype == dtype
    expected = layer.attend_exactly([torch.nan_to_num(each.dequantize()) for each in coded])
    torch.testing.assert_close(found[:3].double(), expected, atol=60 * tolerance, rtol=tolerance)
    for each in layer.cache:
        each[3, :, 24, 3] = math.nan
    broken = layer.attend([round_states(each, codes) for each in layer.cache])
    sees = layer.read[:, :, 24] & (layer.slots == 3)[:, None]
    assert broken[sees].isnan().all() and torch.equal(broken[~sees], found[~sees])


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
