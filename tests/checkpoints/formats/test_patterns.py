# SPDX-License-Identifier: Apache-2.0
"""Patterns of a config match what `re` matches, in a number of steps that is bounded whatever they are."""

from __future__ import annotations

import re

import pytest
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st

from optimum_neuron.checkpoints.formats.patterns import begins


NAME = "model.layers.12.self_attn.q_proj"
PIECES = st.sampled_from(
    ["a", "b", ".", r"\.", r"\w", r"\d", "[ab]", "[^a]", "[]a]", r"[\].-]", "^", "$", r"\b", r"\B", "{", r"\A"]
)
REPEATS = st.sampled_from(
    ["", "", "*", "+", "?", "*?", "+?", "??", "{2}", "{1,2}", "{,2}", "{2,}", "{0}", "{1,3}?", "{,}", "{}"]
)
GROUPS = st.sampled_from(["({})", "(?:{})", "(?={})", "(?!{})"])


def joined(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    repeated = st.tuples(parts, REPEATS).map("".join)
    choice = st.lists(repeated, max_size=4).map("".join)
    return st.tuples(GROUPS, st.lists(choice, min_size=1, max_size=3).map("|".join)).map(
        lambda pair: pair[0].replace("{}", pair[1])
    )


PATTERNS = joined(st.recursive(PIECES, joined, max_leaves=6))


@given(pattern=PATTERNS, name=st.text("ab.1_]-{}\n", max_size=8))
@examples(150)
def test_they_match_what_re_matches(pattern: str, name: str) -> None:
    try:
        expected = re.match(pattern, name) is not None
    except re.error:
        with pytest.raises(ValueError, match="correct config"):
            begins(pattern, name)
    else:
        assert begins(pattern, name) == expected


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        (".*", True), (".*self_attn", True), ("self_attn", False), (r"model\.layers\.(1[0-2]|[0-9])\..*q_proj$", True),
        (r"^(?!.*(mlp|lm_head)).*", True), (r"^(?!.*self_attn).*", False), (r".*layers\.\d{2}\.[^.]*\.[qkv]_proj", True),
        (r"model\.layers\.\d\.", False), ("({)", False), ("(?P<x>model|{)", True), (".{1,2}el", False), (".{1,3}el", True), (".{3}el", True), (".{4,}odel", False),
    ],
)  # fmt: skip
def test_patterns_as_checkpoints_have_them(pattern: str, found: bool) -> None:
    assert begins(pattern, NAME) == found


@pytest.mark.parametrize(
    "pattern",
    [
        r"(\w|\.|[a-z_])*!", r"(.*)*!", r"(\w+\.?)+!", ".*.*.*.*.*.*.*.*.*.*!", "(a|a)*(_|_)*((.|.)|(.|.))*!", "(?=(.+)+!)",
        "(((.{999}){999}){999}){999}", "(.?){400}!", "(.{0,999}){0,999}!", "(?:(?:.*)*)*!",
    ],
)  # fmt: skip
def test_what_costs_exponential_time_elsewhere_does_not_here(pattern: str) -> None:
    assert not begins(pattern, NAME * 4)


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("(" * 900 + ")" * 900, "it is nested too deeply"),
        (r"(?:(?=(?:(?!.*z).)*).)*!", "takes more than 100,000 steps for the name 'model.layers.12"),
        ("a" * 2001, "of 2,001 characters for a name of 128, and both may have 2,000"),
        (r"(.)\1", r"what begins with '\\\\1' is not read"),
        ("(?i)model", r"what begins with '\(\?i\)' is not read"),
        ("(?<=a)b", "is not read"),
        ("(a)(?(1)b|c)", "is not read"),
        ("a{99999999999999999999}", "too large|too big"),
        ("((", "missing"),
    ],
)
def test_what_is_not_read_is_told_in_a_sentence(pattern: str, told: str) -> None:
    with pytest.raises(ValueError, match=told) as caught:
        begins(pattern, NAME * 4)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_a_name_may_be_as_long_as_a_pattern() -> None:
    with pytest.raises(ValueError, match="2 characters for a name of 2,001"):
        begins(".*", "a" * 2001)
    assert begins(".*b", "a" * 1999 + "b")
