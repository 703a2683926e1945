# SPDX-License-Identifier: Apache-2.0
"""Mistakes with keys and values that are codes, planted one at a time: the certificate's comparison finds each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lowered_again import Case, make_case, places, wrap
from torch import Tensor

from optimum_neuron.step.attention import coded_states, kv_cache
from optimum_neuron.step.attention.coded_states import CodedStates, Stored
from optimum_neuron.targets.neuron.operators import attention


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


def _scales_of_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounded(original: Any, states: Tensor, dtype: torch.dtype) -> CodedStates:
        kept = original(states, dtype)
        return CodedStates(kept.codes, kept.scale.flip(0))

    wrap(monkeypatch, kv_cache, "round_states", rounded)


def _codes_of_other_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounded(original: Any, states: Tensor, dtype: torch.dtype) -> CodedStates:
        kept = original(states, dtype)
        return CodedStates(kept.codes.flip(1), kept.scale)

    wrap(monkeypatch, kv_cache, "round_states", rounded)


def _another_largest_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(coded_states.LARGEST_CODE, FP8, 224.0)


PLANTED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "scales of other columns": _scales_of_other_columns,
    "values without scales": _values_without_scales,
    "scales of other tokens": _scales_of_other_tokens,
    "codes of other heads": _codes_of_other_heads,
    "another largest code": _another_largest_code,
}
# The others by the full profile.
QUICK = ("scales of other columns",)


def test_sound_codes_hold(coded: Case) -> None:
    """Though a number or another lies between two codes, of which the graph takes one and the eager step the other."""
    comparisons = coded.compare(coded.lower("mixed"))
    assert places(comparisons) == []
    assert {each.subject.split(": ")[-1] for each in comparisons} >= {
        "decode.logits", "chunk.logits", "key", "value", "keyscale", "valuescale",
    }  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.full]) for name in PLANTED]
)
def test_a_planted_defect_is_found(name: str, coded: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTED[name](monkeypatch)
    assert places(coded.compare(coded.lower("mixed")))
