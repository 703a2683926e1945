# SPDX-License-Identifier: Apache-2.0
"""Decode attention over blocks in place, alone and in steps: the logits of slots, and the same bits wherever blocks lie."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from helpers import ARCHITECTURES, as_tensor, eager_runner, prefill_pieces, random_tokens, tiny_config
from torch import Tensor, nn

from optimum_neuron.core import PromptPiece
from optimum_neuron.runtime.runner import GraphRunner
from optimum_neuron.runtime.step_tensors import DecodeRows
from optimum_neuron.step.attention.masks import AttentionChunk, Window
from optimum_neuron.step.attention.rows import AttentionCall, AttentionRows
from optimum_neuron.step.block_owners import BlockOwners, OwnerSizes, fill_owners
from optimum_neuron.step.spec import GREEDY
from optimum_neuron.targets.neuron.lowering.ops import NEURON_OPS
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


SLOTS = {"sequence_length": 256, "context_buckets": (128, 256), "prefill_chunk_size": 32}
PAGED = SLOTS | {"kv_block_size": 64, "kv_cache_tokens": 512, "target": "hlo"}
PROMPT, OTHER = random_tokens(120), random_tokens(90, seed=1)


def answers(runner: GraphRunner, blocks: Sequence[Sequence[int]] = ()) -> list[Tensor]:
    """Logits of a row that decodes, first beside the chunks of another prompt and then beside its decode row."""
    runner.reset_slots()
    for slot, own in enumerate(blocks, start=1):
        runner.assign_blocks(slot, 0, own)
    logits = [prefill_pieces(runner, 1, PROMPT, [32, 32, 32, 24])]
    slots = runner.config.batch_size
    for index in range(14):
        active = torch.zeros(slots, dtype=torch.bool)
        active[1] = True
        active[2] = index >= 3
        tokens = torch.full((slots,), 3 + index, dtype=torch.int32).numpy()
        params, uniforms = torch.tensor([GREEDY] * slots).float().numpy(), torch.zeros(slots).numpy()
        chunks = [PromptPiece(2, OTHER[32 * index : 32 * (index + 1)])] if index < 3 else []
        output = runner.run_step(chunks, DecodeRows(tokens, active.numpy(), params, uniforms))
        assert output.decode_logits is not None
        logits.append(as_tensor(output.decode_logits[1]))
        logits += [as_tensor(output.decode_logits[2])] if index >= 3 else []
    return logits


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_blocks_in_place_give_the_logits_of_slots_wherever_they_are(
    name: str, tiny_models: dict[str, nn.Module]
) -> None:
    expected = answers(eager_runner(tiny_models[name], tiny_config(**SLOTS)))
    runner = eager_runner(tiny_models[name], tiny_config(**PAGED), ops=NEURON_OPS)
    placements = [((0, 1, 2), (3, 4)), ((7, 5, 3), (2, 6)), ((1, 7, 0), (4, 3))]
    found = [answers(runner, each) for each in placements]
    assert all((one - other).abs().max() < 1e-5 for one, other in zip(found[0], expected, strict=True))
    assert {each for each in runner.graph_calls if "128" in each and "chunked" not in each}
    for one, other in zip(found[1], found[2], strict=True):  # graphs of all blocks
        assert torch.equal(one, other)
