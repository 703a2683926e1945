# SPDX-License-Identifier: Apache-2.0
"""Decode attention over blocks in place: the results of slots, and the same bits wherever blocks lie."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from optimum_neuron.step.attention.masks import AttentionChunk, Window
from optimum_neuron.step.attention.rows import AttentionCall, AttentionRows
from optimum_neuron.step.block_owners import BlockOwners, OwnerSizes, fill_owners
from optimum_neuron.targets.neuron.operators import attention
from optimum_neuron.targets.neuron.operators.attention import OwnedBlocks, attend_blocks, heads_at_once


BLOCK, ROW_BLOCKS, BLOCKS, KV_HEADS, HEADS, KEY_DIM = 8, 5, 24, 2, 6, 16
# In the middle of a block, at the first token of one, alone, full, idle; three more follow the first two blocks of the first.
POSITIONS = (21, 16, 0, BLOCK * ROW_BLOCKS - 1, -1, 27, 17, 16)
ROWS = len(POSITIONS)
PREFIX, SHARING = 2, (5, 6, 7)
KINDS: dict[str, dict] = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.linspace(-3, 6, HEADS)},
    "column bias": {"column_bias": torch.linspace(0.1, 1.5, HEADS)[:, None] * torch.arange(BLOCK * ROW_BLOCKS)},
}


class Case:
    """A layer's tokens by row, and the call of its decode rows."""

    def __init__(self, kind: str, window: Window, dtype: torch.dtype, value_dim: int) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        dims = KEY_DIM, value_dim
        self.dtype = dtype
        self.query = random(ROWS, HEADS, 1, KEY_DIM)
        self.past = [random(ROWS, KV_HEADS, BLOCK * ROW_BLOCKS, dim) for dim in dims]
        for each in self.past:
            each[list(SHARING), :, : PREFIX * BLOCK] = each[0, :, : PREFIX * BLOCK]
        self.own = [random(ROWS, KV_HEADS, dim) for dim in dims]
        self.positions = torch.tensor(POSITIONS, dtype=torch.int32)[:, None]
        options: dict = {"softcap": None, "sinks": None} | KINDS[kind]
        self.call = AttentionCall(0, self.query, *self.own, 0.25, window, **options)
        self.group = AttentionRows(self.positions, None, BLOCK * ROW_BLOCKS)
        self.earlier = self.group.earlier(window, 0, BLOCK * ROW_BLOCKS)[:, 0]

    def in_slots(self) -> Tensor:
        return attention.attend_decode(self.call, self.group, self.query, *self.past, *self.own)

    def in_blocks(
        self, order: list[int], *, share: bool, places: int, filler: float = 0.0, change: Callable | None = None
    ) -> Tensor:
        """Attention with the rows' blocks at the places that `order` names one after the other.

        Args:
            filler: what all else in the cache holds.
            change: is given what the graph would be told.
        """
        free = iter(order)
        tables = np.zeros((ROWS, ROW_BLOCKS), np.int32)
        counts = np.array([-(-max(position, 0) // BLOCK) for position in POSITIONS], np.int32)
        cache = [
            torch.full((BLOCKS + 1, KV_HEADS, BLOCK, each.shape[-1]), filler, dtype=self.dtype) for each in self.past
        ]
        for row in range(ROWS):
            first = PREFIX if share and row in SHARING else 0
            tables[row, :first] = tables[0, :first]
            for j in range(first, counts[row]):
                block = tables[row, j] = next(free)
                columns = slice(j * BLOCK, (j + 1) * BLOCK)
                seen = self.earlier[[0, *SHARING] if share and row == 0 and j < PREFIX else [row], columns].any(0)
                for each, states in zip(cache, self.past, strict=True):
                    each[block] = torch.where(seen[:, None], states[row, :, columns], filler)
        sizes = OwnerSizes(ROWS, ROW_BLOCKS, BLOCKS, BLOCK, places)
        told = {name: np.zeros(shape, np.int32) for name, shape in sizes.shapes().items()}
        fill_owners(told, sizes, tables, counts)
        if change is not None:
            change(told)
        owned = OwnedBlocks(self.positions, **{name: torch.from_numpy(each) for name, each in told.items()})
        return attend_blocks(self.call, owned, self.query, *cache, *self.own)


IN_PLACE = {"share": False, "places": 0}
SHARED = {"share": True, "places": 3}
ways = pytest.mark.parametrize(
    "way", [IN_PLACE, {"share": False, "places": 3}, SHARED], ids=["place", "room", "shared"]
)


def with_cases(test: Callable) -> Callable:
    for mark in (
        ways,
        pytest.mark.parametrize("kind", KINDS),
        pytest.mark.parametrize("window", [None, 6, 14, AttentionChunk(16)], ids=str),
        pytest.mark.parametrize(
            ("dtype", "value_dim"), [(torch.float32, 16), (torch.float32, 12), (torch.bfloat16, 12)], ids=str
        ),
    ):
        test = mark(test)
    return test


def placements() -> list[list[int]]:
    return [torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(3)]


@with_cases
def test_blocks_attend_as_slots_do_and_no_bit_depends_on_where_they_lie(
    way: dict, kind: str, window: Window, dtype: torch.dtype, value_dim: int
) -> None:
    case = Case(kind, window, dtype, value_dim)
    expected = case.in_slots()
    found = case.in_blocks(list(range(BLOCKS)), **way)
    tolerance = 2e-6 if dtype == torch.float32 else 0.03
    assert found.shape == expected.shape and found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    for order in placements():
        assert torch.equal(case.in_blocks(order, **way), found)
    for filler in (math.nan, math.inf, -torch.finfo(dtype).max):  # other rows' blocks are among it
        assert torch.equal(case.in_blocks(placements()[0], **way, filler=filler), found)


@pytest.mark.parametrize("window", [None, 6, AttentionChunk(16)], ids=str)
@ways
def test_a_broken_token_reaches_the_rows_that_see_it_alone(way: dict, window: Window) -> None:
    case = Case("plain", window, torch.float32, 12)
    expected = case.in_blocks(placements()[0], **way)
    for row, column in ((0, 3), (0, 12), (0, 20), (3, 38), (3, 1), (5, 26)):
        past = [each.clone() for each in case.past]
        rows = [row, *SHARING] if row == 0 and column < PREFIX * BLOCK else [row]
        for each in case.past:
            each[rows, :, column] = math.nan
        found = case.in_blocks(placements()[0], **way)
        sees = torch.zeros(ROWS, dtype=torch.bool)
        sees[rows] = case.earlier[rows, column]
        assert found[sees].isnan().all() and torch.equal(found[~sees], expected[~sees])
        case.past = past


@ways
def test_heads_and_joins_in_parts_change_nothing_beyond_rounding(way: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("sinks", None, torch.float32, 16)
    whole = case.in_blocks(placements()[0], **way)
    assert heads_at_once(BLOCKS, HEADS // KV_HEADS, BLOCK, 16) > KV_HEADS
    monkeypatch.setattr(attention, "SCORES_LIMIT", 4 * ROWS * 3 * 17 * 2)  # two blocks of a head join at a time
    assert heads_at_once(BLOCKS, HEADS // KV_HEADS, BLOCK, 16) == 1
    found = case.in_blocks(placements()[0], **way)
    torch.testing.assert_close(found, whole, atol=2e-6, rtol=2e-6)
    assert not torch.equal(found, whole) or way["places"] == 0
    for order in placements():
        assert torch.equal(case.in_blocks(order, **way), found)


@pytest.mark.parametrize("defect", ["owner", "missing", "another", "base", "shared base"])
def test_a_wrong_owner_base_or_join_is_no_rounding(defect: str) -> None:
    def change(told: dict) -> None:
        if defect == "owner":
            told["block_owner"][:] = np.roll(told["block_owner"], 1)
        elif defect in ("missing", "another"):
            none = BLOCKS + ROWS * len(told.get("shared_blocks", ()))
            told["joined"][3, 2] = none if defect == "missing" else told["joined"][0, 2]
        else:
            told["block_base" if defect == "base" else "shared_base"] += BLOCK

    case = Case("plain", None, torch.float32, 16)
    order = placements()[0]
    whole = case.in_blocks(order, **SHARED)
    assert (case.in_blocks(order, **SHARED, change=change) - whole).abs().max() > 1e-2


def test_the_fields_are_those_that_are_filled() -> None:
    assert set(BlockOwners._fields) < set(OwnedBlocks.__dataclass_fields__)
