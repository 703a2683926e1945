# SPDX-License-Identifier: Apache-2.0
"""Patterns of published checkpoints match as their libraries match them, and no pattern keeps an export waiting."""

from __future__ import annotations

import pytest

from optimum_neuron.checkpoints.formats import settings
from optimum_neuron.checkpoints.formats.settings import begins_with


NAME = "model.layers.12.self_attn.q_proj"


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        (".*", True), (".*self_attn", True), ("self_attn", False), (r"model\.layers\.(1[0-2]|[0-9])\..*q_proj$", True),
        (r"^(?!.*(mlp|lm_head)).*", True), (r"^(?!.*self_attn).*", False), (r".*layers\.\d{2}\.[^.]*\.[qkv]_proj", True),
        (r"model\.layers\.\d\.", False), (r".*\.(?:[5-9]|1[0-9])\..*gate.*", False), (r".*self_attn\.(?:q|k_b)_proj$", True),
        (r"(?i)MODEL\.(.)ayers", True),
    ],
)  # fmt: skip
def test_patterns_as_checkpoints_have_them(pattern: str, found: bool) -> None:
    assert begins_with(pattern, NAME) == found


def test_a_pattern_that_takes_exponential_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_SECONDS", 0.01)
    with pytest.raises(ValueError, match=r"which takes more than 0\.01 s for the name 'aaaaaa"):
        begins_with("(?:a|aa|ab|b)*x|(?:a|aa|ab|b)*y", "a" * 60 + "c")


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("((", "missing"), ("a{3,2}", "correct config"), ("(" * 1500 + ")" * 1500, "recursion"),
        ("(((.{99}){99}){99}){99}", "repeats a part more than 10,000 times"), ("a{99999999999999999999}", "repeats a part"),
    ],
)  # fmt: skip
def test_what_is_no_expression_or_too_large_is_told_in_a_sentence(pattern: str, told: str) -> None:
    with pytest.raises(ValueError, match=told) as caught:
        begins_with(pattern, NAME)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
