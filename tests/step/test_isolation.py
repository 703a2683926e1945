# SPDX-License-Identifier: Apache-2.0
"""Inside one graph a request's results are a function of its own tokens, to the last bit, on every target."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from helpers import (
    ARCHITECTURES,
    CHUNK_SIZE,
    LENGTH,
    TRASH_ROW,
    Opener,
    decode_tokens,
    examples,
    fill_rows,
    generate,
    prefill_pieces,
    random_tokens,
    read_states,
    same_states,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

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
def test_neighbors_change_no_bit(open_runner: Opener, tiny_specs: dict[str, ModelSpec], target: str) -> None:
    runner, spec = open_runner("llama", target), tiny_specs["llama"]
    prompt, other = random_tokens(20, seed=1), random_tokens(LENGTH, seed=2)

    def run(busy: Iterator[bool]) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Slot 1 takes three chunks and three tokens; where told to, slot 0 shares the step and slot 2 decodes."""
        runner.reset_slots()
        runner.run_step([PromptPiece(0, other[:2]), PromptPiece(2, other[:3])])
        results = []
        for start in (0, 8, 16):
            chunks = [PromptPiece(1, prompt[start : start + 8])]
            if next(busy):
                length = int(runner.lengths[0])
                chunks.insert(0, PromptPiece(0, other[length : length + 5]))
            logits = runner.run_step(chunks).chunk_logits
            assert logits is not None
            results.append(logits[len(chunks) - 1].clone())
            if next(busy):
                decode_tokens(runner, {2: 7})
        for token in (5, 6, 7):
            neighbors = {2: 9, 0: 4} if next(busy) else {}
            results.append(decode_tokens(runner, {1: token} | neighbors)[1][1])
        return results, read_states(runner, spec)

    expected, states = run(iter([False] * 9))

    @examples(10)
    @given(st.lists(st.booleans(), min_size=9, max_size=9))
    def check(busy: list[bool]) -> None:
        results, after = run(iter(busy))
        assert all(map(torch.equal, results, expected))
        assert same_states(after, states, [1], stop=23)

    check()


@pytest.mark.parametrize(
    ("name", "target"),
    [*((name, "eager") for name in ARCHITECTURES), pytest.param("llama", "cpu", marks=pytest.mark.slow)],
)
def test_nan_in_the_trash_row_and_in_free_slots_reaches_no_live_row(
    open_runner: Opener, tiny_specs: dict[str, ModelSpec], name: str, target: str
) -> None:
    runner, spec, prompt = open_runner(name, target), tiny_specs[name], random_tokens(13)
    fill_rows(runner, spec, range(4), 0.0)
    expected_tokens, expected = generate(runner, prompt, 6)
    fill_rows(runner, spec, [0], 0.0)
    fill_rows(runner, spec, [1, 2, TRASH_ROW], float("nan"))
    tokens, logits = generate(runner, prompt, 6)
    assert tokens == expected_tokens
    assert torch.equal(logits, expected)
    fill_rows(runner, spec, range(4), 0.0)  # the runner is shared


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


@pytest.mark.parametrize("target", TARGETS)
def test_a_decode_step_between_two_chunks_leaves_the_prefilling_slot_alone(
    open_runner: Opener, tiny_specs: dict[str, ModelSpec], target: str
) -> None:
    runner, spec, prompt = open_runner("llama", target), tiny_specs["llama"], random_tokens(16)
    prefill_pieces(runner, 0, random_tokens(4, seed=3), [4])
    prefill_pieces(runner, 1, prompt[:8], [8])
    before = read_states(runner, spec)
    decode_tokens(runner, {0: 5})
    assert same_states(read_states(runner, spec), before, [1, 2])
    logits = prefill_pieces(runner, 1, prompt[8:], [8])
    runner.reset_slots()
    assert torch.equal(logits, prefill_pieces(runner, 1, prompt, [8, 8]))
