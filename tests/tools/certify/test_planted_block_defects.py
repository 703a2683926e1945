# SPDX-License-Identifier: Apache-2.0
"""Mistakes about the owners of blocks, planted one at a time: the certificate's comparison finds each of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lowered_again import Case, make_case, places, wrap

from optimum_neuron.step import step as step_module
from optimum_neuron.step.attention.rows import OwnedBlocks
from optimum_neuron.targets.neuron.graphs.io import COPY_SLOT
from optimum_neuron.targets.neuron.lowering.graph_modules import SlotCopy


SIZES = {"sequence_length": 256, "context_buckets": (256,), "kv_block_size": 64, "kv_cache_tokens": 512, "window": 100}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("blocks"), 1, "mixed", COPY_SLOT, **SIZES)


def test_sound_blocks_hold_with_shared_ones_among_them(case: Case) -> None:
    comparisons = case.compare(case.lower("mixed", COPY_SLOT))
    assert places(comparisons) == [] and all(each.difference <= each.bound / 3 for each in comparisons)
    bases = [step.inputs["decode.shared_base"] for step in case.setup.steps if "decode.shared_base" in step.inputs]
    assert any((base < 256).any() for base in bases)


@pytest.mark.full
def test_sound_blocks_of_two_ranks_hold(tmp_path_factory: pytest.TempPathFactory) -> None:
    case = make_case(tmp_path_factory.mktemp("ranks"), 2, "mixed", **SIZES)
    assert places(case.compare(case.lower("mixed"))) == []


def wrong_owner(told: OwnedBlocks) -> OwnedBlocks:
    return dataclasses.replace(told, block_owner=told.block_owner.roll(1))


def base_off_by_a_block(told: OwnedBlocks) -> OwnedBlocks:
    return dataclasses.replace(told, block_base=told.block_base + 64)


def shared_base_off_by_a_block(told: OwnedBlocks) -> OwnedBlocks:
    assert told.shared_base is not None
    return dataclasses.replace(told, shared_base=told.shared_base + 64)


def missing_block(told: OwnedBlocks) -> OwnedBlocks:
    """The last place of a row is joined as its second."""
    return dataclasses.replace(told, joined=told.joined[:, [0, 3, 2, 3]])


def block_twice(told: OwnedBlocks) -> OwnedBlocks:
    return dataclasses.replace(told, joined=told.joined[:, [0, 0, 2, 3]])


def another_row(told: OwnedBlocks) -> OwnedBlocks:
    return dataclasses.replace(told, joined=told.joined.flip(0))


DEFECTS = [wrong_owner, base_off_by_a_block, shared_base_off_by_a_block, missing_block, block_twice, another_row]


@pytest.mark.parametrize(
    "defect",
    [wrong_owner, *(pytest.param(each, marks=pytest.mark.full) for each in DEFECTS if each is not wrong_owner)],
)
def test_a_planted_defect_is_found(
    defect: Callable[[OwnedBlocks], OwnedBlocks], case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    def owned(original: Any, group: Any) -> OwnedBlocks | None:
        told = original(group)
        return None if told is None else defect(told)

    wrap(monkeypatch, step_module, "_owned_blocks", owned)
    assert places(case.compare(case.lower("mixed", COPY_SLOT)))


def test_tokens_that_are_written_to_a_neighbors_block_are_found(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def indices(original: Any, positions: Any, actual: Any, blocks: Any, *others: int) -> Any:
        return original(positions, actual, blocks.flip(0) if blocks.shape[1] == 1 else blocks, *others)

    wrap(monkeypatch, step_module, "block_indices", indices)
    assert places(case.compare(case.lower("mixed", COPY_SLOT)))


@pytest.mark.full
def test_a_copy_of_one_column_too_many_is_found(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = SlotCopy.forward
    monkeypatch.setattr(
        SlotCopy, "forward", lambda self, source, destination, length: forward(self, source, destination, length + 1)
    )
    assert places(case.compare(case.lower("mixed", COPY_SLOT)))
    assert torch.is_tensor(case.setup.steps[-2].inputs["copy.length"])
