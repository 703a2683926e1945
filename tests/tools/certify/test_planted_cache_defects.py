# SPDX-License-Identifier: Apache-2.0
"""Mistakes about the owners of blocks, and with keys and values that are codes, planted one at a time: the comparison finds each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lowered_again import Case, make_case, places, wrap
from torch import Tensor

from optimum_neuron.step import step as step_module
from optimum_neuron.step.attention import coded_states, kv_cache
from optimum_neuron.step.attention.coded_states import CodedStates, Stored
from optimum_neuron.step.attention.rows import OwnedBlocks
from optimum_neuron.targets.neuron.graphs.io import COPY_SLOT
from optimum_neuron.targets.neuron.lowering.graph_modules import SlotCopy
from optimum_neuron.targets.neuron.operators import attention


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


DEFECTS: dict[str, Callable[[OwnedBlocks], dict[str, Any]]] = {
    "wrong owner": lambda owned: {"block_owner": owned.block_owner.roll(1)},
    "base off by a block": lambda owned: {"block_base": owned.block_base + 64},
    "shared base off by a block": lambda owned: {"shared_base": owned.shared_base + 64},
    # The last place of a row is joined as its second, or its first twice.
    "missing block": lambda owned: {"joined": owned.joined[:, [0, 3, 2, 3]]},
    "block twice": lambda owned: {"joined": owned.joined[:, [0, 0, 2, 3]]},
    "another row": lambda owned: {"joined": owned.joined.flip(0)},
}


@pytest.mark.parametrize(
    "name", ["wrong owner", *(pytest.param(each, marks=pytest.mark.full) for each in list(DEFECTS)[1:])]
)
def test_a_planted_defect_of_blocks_is_found(name: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def owned(original: Any, *args: Any, **kwargs: Any) -> OwnedBlocks:
        found: OwnedBlocks = original(*args, **kwargs)
        return dataclasses.replace(found, **DEFECTS[name](found))

    wrap(monkeypatch, step_module, "OwnedBlocks", owned)
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


FP8 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("coded"), 1, "mixed", kv_cache_dtype="fp8")


def _scales_of_other_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    def products(original: Any, query: Tensor, keys: Stored, dtype: torch.dtype) -> Tensor:
        if isinstance(keys, CodedStates):
            keys = CodedStates(keys.codes, keys.scale.roll(1, -2))
        return original(query, keys, dtype)

    wrap(monkeypatch, attention, "products", products)


def _values_without_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    def weighted_sum(original: Any, weights: Tensor, values: Stored, dtype: torch.dtype) -> Tensor:
        if isinstance(values, CodedStates):
            values = CodedStates(values.codes, values.scale * 0 + 1)
        return original(weights, values, dtype)

    wrap(monkeypatch, attention, "weighted_sum", weighted_sum)


def _codes_of_other_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounded(original: Any, states: Tensor, dtype: torch.dtype) -> CodedStates:
        kept = original(states, dtype)
        return CodedStates(kept.codes.flip(1), kept.scale)

    wrap(monkeypatch, kv_cache, "round_states", rounded)


def _another_largest_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(coded_states.LARGEST_CODE, FP8, 224.0)


PLANTED = (_scales_of_other_columns, _values_without_scales, _codes_of_other_heads, _another_largest_code)


def test_sound_codes_hold(coded: Case) -> None:
    """Though a number or another lies between two codes, of which the graph takes one and the eager step the other."""
    comparisons = coded.compare(coded.lower("mixed"))
    assert places(comparisons) == []
    assert {each.subject.split(": ")[-1] for each in comparisons} >= {
        "decode.logits", "chunk.logits", "key", "value", "keyscale", "valuescale",
    }  # fmt: skip


@pytest.mark.parametrize("plant", [PLANTED[0], *(pytest.param(each, marks=pytest.mark.full) for each in PLANTED[1:])])
def test_a_planted_defect_of_codes_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], coded: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert places(coded.compare(coded.lower("mixed")))
