# SPDX-License-Identifier: Apache-2.0
"""Inside one graph a request's results are a function of its own tokens, to the last bit, on every target."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    ARCHITECTURES,
    CHUNK_SIZE,
    TRASH_ROW,
    Opener,
    decode_tokens,
    examples,
    fill_rows,
    prefill_pieces,
    random_tokens,
    read_states,
    same_states,
)
from hypothesis import given
from hypothesis import strategies as st

from optimum_neuron.core import PromptPiece
from optimum_neuron.step.model_spec import ModelSpec


TARGETS = ("eager", pytest.param("cpu", marks=pytest.mark.slow))


@st.composite
def splits(draw: st.DrawFn) -> list[int]:
    """Chunk sizes of a prompt."""
    total, pieces = draw(st.integers(1, 40)), [0]
    while sum(pieces) < total:
        pieces.append(draw(st.integers(1, min(CHUNK_SIZE, total - sum(pieces)))))
    return pieces[1:]


@pytest.mark.parametrize(
    ("name", "target"),
    [
        *((name, "eager") for name in ARCHITECTURES),
        *(pytest.param(name, "cpu", marks=pytest.mark.slow) for name in ("llama", "qwen3", "gpt_oss")),
    ],
)
def test_chunk_boundaries_and_old_contents_change_no_bit(
    open_runner: Opener, tiny_specs: dict[str, ModelSpec], name: str, target: str
) -> None:
    runner, spec = open_runner(name, target), tiny_specs[name]

    @examples(12)
    @given(splits(), st.integers(0, 2))
    def check(pieces: list[int], slot: int) -> None:
        length = sum(pieces)
        prompt = random_tokens(length, seed=length)
        runner.reset_slots()
        fill_rows(runner, spec, range(4), 0.0)
        whole = [CHUNK_SIZE] * (length // CHUNK_SIZE) + [length % CHUNK_SIZE] * (length % CHUNK_SIZE > 0)
        expected = [prefill_pieces(runner, slot, prompt, whole), decode_tokens(runner, {slot: 5})[1][slot]]
        states = read_states(runner, spec)
        runner.reset_slots()
        fill_rows(runner, spec, range(4), None)
        results = [prefill_pieces(runner, slot, prompt, pieces), decode_tokens(runner, {slot: 5})[1][slot]]
        assert all(map(torch.equal, results, expected))
        assert same_states(read_states(runner, spec), states, [slot], stop=length + 1)

    check()


@pytest.mark.parametrize("target", TARGETS)
def test_a_step_writes_its_own_columns_and_the_trash_row_only(
    open_runner: Opener, tiny_specs: dict[str, ModelSpec], target: str
) -> None:
    runner, spec = open_runner("llama", target), tiny_specs["llama"]
    prefill_pieces(runner, 0, random_tokens(5), [5])
    prefill_pieces(runner, 2, random_tokens(9), [8, 1])
    fill_rows(runner, spec, [1], None)
    before = read_states(runner, spec)
    runner.run_step([PromptPiece(0, random_tokens(3))])
    after_chunk = read_states(runner, spec)
    decode_tokens(runner, {2: 7})
    after_decode = read_states(runner, spec)
    for name in before:
        written = (after_chunk[name] != before[name]).any(dim=(1, 3))[:TRASH_ROW].nonzero().tolist()
        assert written == [[0, 5], [0, 6], [0, 7]]
        written = (after_decode[name] != after_chunk[name]).any(dim=(1, 3))[:TRASH_ROW].nonzero().tolist()
        assert written == [[2, 9]]
