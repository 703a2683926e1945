# SPDX-License-Identifier: Apache-2.0
"""Stop strings: no part of one gets out, whatever pieces the text comes in, and nothing else is held back."""

from __future__ import annotations

import pytest
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st

from optimum_neuron.tools.serve.stop_strings import StopStrings


# Few letters, so that stop strings begin, break off and begin again.
LETTERS = st.text("ab", max_size=12)


@examples(400)
@given(pieces=st.lists(LETTERS, max_size=8), stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
def test_a_text_gets_out_up_to_the_first_stop_string(pieces: list[str], stops: list[str]) -> None:
    scanner, out, text = StopStrings(stops), "", ""
    for piece in pieces:
        out += scanner.push(piece)
        text += piece
        places = [text.find(stop) for stop in stops if stop in text]
        if places:
            assert scanner.found is not None and text.find(scanner.found) == min(places)
            assert out == text[: min(places)]
            return
        assert scanner.found is None
        held = text[len(out) :]
        assert out + held == text
        assert all(not stop.startswith(text[start:]) for stop in stops for start in range(len(out)))
        assert not held or any(stop.startswith(held) for stop in stops)
    assert out + scanner.finish() == text


@pytest.mark.parametrize(
    ("pieces", "stops", "out", "found"),
    [
        (["ab", "ac", "x"], ["abac"], "", "abac"),
        (["a<", "|e", "nd", "|>b"], ["<|end|>"], "a", "<|end|>"),
        (["aab"], ["b", "ab"], "a", "ab"),
        (["ab"], ["abc", "b"], "a", "b"),
    ],
)
def test_of_several_the_one_that_begins_first_ends_the_text(
    pieces: list[str], stops: list[str], out: str, found: str
) -> None:
    scanner = StopStrings(stops)
    assert "".join(scanner.push(piece) for piece in pieces if scanner.found is None) == out
    assert scanner.found == found
