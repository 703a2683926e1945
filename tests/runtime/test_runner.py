# SPDX-License-Identifier: Apache-2.0
"""GraphRunner picks the smallest graph, keeps the slots' lengths, and refuses before it writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    CHUNK_SIZE,
    LENGTH,
    VOCAB,
    Recorder,
    decode_rows,
    decode_tokens,
    eager_runner,
    fill_rows,
    prefill_pieces,
    random_tokens,
    read_states,
    same_states,
    tiny_config,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from optimum_neuron.core import PromptPiece
from optimum_neuron.parity.inspect import inspect_model
from optimum_neuron.runtime.prefill import prefill_prompts
from optimum_neuron.runtime.runner import GraphRunner
from optimum_neuron.runtime.step_tensors import DecodeRows
from optimum_neuron.step.spec import GraphSpec, SamplingParams, graph_specs


CHUNKS, CONTEXTS = (2, 4, 8), (6, 16, LENGTH)
SAMPLED = SamplingParams(top_k=20, top_p=0.9, temperature=0.8)


@pytest.fixture(scope="module")
def llama(tiny_models: dict[str, nn.Module]) -> nn.Module:
    return tiny_models["llama"]


def recorded_runner(**changes: object) -> tuple[GraphRunner, Recorder]:
    config = tiny_config(**{"prefill_chunk_buckets": CHUNKS[:-1], "context_buckets": CONTEXTS} | changes)
    recorder = Recorder(graph_specs(config))
    return GraphRunner(recorder, config, graph_specs(config)), recorder


def graph_named(kind: str, **changes: int) -> GraphSpec:
    return replace(next(graph for graph in graph_specs(tiny_config()) if graph.kind == kind), **changes)


def decode(runner: GraphRunner, slots: Sequence[int]) -> None:
    runner.run_step((), DecodeRows(*decode_rows(runner, dict.fromkeys(slots, 5), SAMPLED, 0.25)))


def take(*pieces: tuple[int, int], decodes: int | None = None, **options: Any) -> Callable[[GraphRunner], object]:
    """A step with pieces of slots, by their numbers of tokens, and the decode row of one slot."""
    given = [PromptPiece(slot, random_tokens(count)) for slot, count in pieces]
    return lambda runner: runner.run_step(
        given, None if decodes is None else decode_rows(runner, {decodes: 5}), **options
    )


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (take((0, 4)), "slot 0 holds 61 tokens and cannot take 4 more: .*64"),
        (take((1, 2), (0, 4)), "slot 0 holds 61"),
        (take((1, 17)), "1 to ctx_batch_size=2 rows of prefill_chunk_size=8 tokens, .* not 3 rows"),
        (take((1, 0)), "slot 1 has no token"),
        (take((1, 2), (1, 2)), r"each slot once, not 2 rows of the slots \[1, 1\]"),
        (take((0, 1), (1, 1), (2, 1)), "1 to ctx_batch_size=2 rows"),
        (take(), r"1 to ctx_batch_size=2 rows .* not 0 rows of the slots \[\]"),
        (take((3, 1)), "slot 3 .* batch_size=3"),
        (take((-1, 1)), "slot -1 .* batch_size=3"),
        (lambda runner: decode_tokens(runner, {0: 5, 2: 5}), "slot 2 is full: it holds sequence_length=64 tokens"),
        (take((1, 2), decodes=2), "slot 2 is full: it holds sequence_length=64 tokens"),
        (take((0, 2), decodes=0), "slot 0 cannot decode and take a chunk in the same step"),
        (lambda runner: runner.resume_slot(1, 65), "slot 1 has room for 64 tokens: 65 of them cannot be resumed"),
        (lambda runner: runner.copy_block(0, 1, 65), "65 tokens of block 0 cannot be copied to block 1"),
        (lambda runner: runner.assign_blocks(1, 0, [0]), "slot 1 is given blocks"),
        (take((1, 2), graph=graph_named("token_generation")), r"the graph token_generation_context64 does not hold a step"),
        (take(decodes=0, graph=graph_named("chunked_prefill")), r"not hold .* at a context of 62 with decode rows"),
        (take((1, 9), graph=graph_named("mixed", ctx_batch_size=1)), r"a step of prompt chunks of \[9\] tokens"),
        (take(decodes=0, graph=graph_named("mixed", context_length=61)), "context61 does not hold .* at a context of 62"),
        # It is another artifact's.
        (take((1, 2), graph=graph_named("mixed", on_device_sampling=False)), "mixed_chunk8_context64 does not hold"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_anything_is_written(
    llama: nn.Module, action: Callable[[GraphRunner], object], words: str
) -> None:
    runner, spec = eager_runner(llama, tiny_config()), inspect_model(llama)
    fill_rows(runner, spec, range(4), None)
    prefill_pieces(runner, 0, random_tokens(61), [8] * 7 + [5])
    prefill_pieces(runner, 2, random_tokens(64), [8] * 8)
    before, calls, lengths = read_states(runner, spec), dict(runner.graph_calls), runner.lengths.tolist()
    with pytest.raises(ValueError, match=words):
        action(runner)
    assert lengths == runner.lengths.tolist() == [61, 0, 64]
    assert runner.graph_calls == calls
    assert same_states(read_states(runner, spec), before, range(4))


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ([5, LENGTH + 1], "a prompt of 65 tokens does not fit sequence_length=64"),
        ([5, 0], "a prompt has 0 tokens, but needs at least 1"),
        ([5, 5, 5, 5], r"4 rows .* do not fit batch_size=3"),
    ],
)
def test_prefill_checks_every_prompt_before_it_writes(llama: nn.Module, lengths: list[int], words: str) -> None:
    runner = eager_runner(llama, tiny_config())
    with pytest.raises(ValueError, match=words):
        prefill_prompts(runner, [random_tokens(length) for length in lengths])
    assert not runner.graph_calls and not runner.lengths.any()


@given(st.integers(0, LENGTH - 1), st.integers(1, CHUNK_SIZE))
def test_a_chunk_runs_in_the_smallest_graph_that_fits(start: int, count: int) -> None:
    runner, recorder = recorded_runner()
    count = min(count, LENGTH - start)
    runner.lengths[1] = start
    runner.run_step([PromptPiece(1, random_tokens(count))])
    chunk = min(size for size in CHUNKS if 2 * size >= count)  # a chunk may take both rows of the step
    context = min(size for size in CONTEXTS if size >= max(start + count, chunk))
    assert dict(runner.graph_calls) == {f"chunked_prefill_chunk{chunk}_context{context}": 1}
    assert recorder.runs[0][0].name in runner.graph_calls


def test_a_step_runs_in_the_graph_that_its_planner_chose() -> None:
    runner, recorder = recorded_runner()
    for graph in (runner.family.kind("chunked_prefill")[-1], runner.family.kind("mixed")[0]):
        runner.run_step([PromptPiece(1, random_tokens(2))], graph=graph)
        assert recorder.runs[-1][0] == graph
    assert runner.lengths.tolist() == [0, 4, 0]


@given(st.lists(st.integers(0, LENGTH - 1), min_size=3, max_size=3), st.sets(st.integers(0, 2)))
def test_a_decode_step_runs_in_the_smallest_graph_of_its_active_slots(lengths: list[int], slots: set[int]) -> None:
    runner, recorder = recorded_runner()
    runner.lengths[:] = lengths
    decode(runner, list(slots))
    longest = max((lengths[slot] for slot in slots), default=0) + 1
    context = min(size for size in CONTEXTS if size >= longest)
    assert dict(runner.graph_calls) == {f"token_generation_context{context}": 1}
    positions = recorder.runs[0][1]["position_ids"][:, 0].tolist()
    assert positions == [lengths[slot] if slot in slots else -1 for slot in range(3)]
    assert runner.lengths.tolist() == [lengths[slot] + (slot in slots) for slot in range(3)]


def test_a_step_sends_tokens_positions_slots_and_sampling_of_every_row() -> None:
    runner, recorder = recorded_runner()
    runner.lengths[:] = [0, 5, 7]
    pieces = [PromptPiece(2, np.array([11, 12, 13]), SAMPLED, 0.5), PromptPiece(1, np.array([21]), uniform=0.75)]
    runner.run_step(pieces)
    spec, inputs = recorder.runs[0]
    assert spec.name == "chunked_prefill_chunk4_context16"
    assert inputs["input_ids"].tolist() == [[11, 12, 13, 13], [21, 21, 21, 21]]
    assert inputs["position_ids"].tolist() == [[7, 8, 9, 9], [5, 5, 5, 5]]
    assert inputs["seq_ids"].tolist() == [2, 1]
    assert torch.equal(inputs["sampling_params"], torch.tensor([SAMPLED, SamplingParams()]))
    assert inputs["uniforms"].tolist() == [0.5, 0.75]
    assert runner.lengths.tolist() == [0, 6, 10]
    decode(runner, [1])
    assert torch.equal(recorder.runs[1][1]["sampling_params"], torch.tensor([SAMPLED] * 3))
    assert recorder.runs[1][1]["uniforms"].tolist() == [0.25] * 3


def test_a_row_left_over_from_the_step_before_is_idle() -> None:
    runner, recorder = recorded_runner()
    runner.run_step([PromptPiece(0, random_tokens(3)), PromptPiece(1, random_tokens(4))])
    runner.run_step([PromptPiece(2, random_tokens(6))])
    runner.lengths[2] = 0
    runner.run_step([PromptPiece(2, random_tokens(1)), PromptPiece(1, random_tokens(3))])
    runner.run_step([PromptPiece(2, random_tokens(2))])
    assert recorder.runs[2][1]["position_ids"].tolist() == [[0, 0, 0, 0], [4, 5, 6, 6]]
    assert recorder.runs[3][1]["position_ids"].tolist() == [[1, 2], [-1, -1]]


@pytest.mark.parametrize(
    ("sampling", "logits", "chosen", "scored"), [(True, True, True, True), (True, False, True, False), (False, False, False, True)],
)  # fmt: skip
def test_outputs_that_no_graph_returns_are_none(sampling: bool, logits: bool, chosen: bool, scored: bool) -> None:
    """A chunk's logits are always returned."""
    runner, _ = recorded_runner(on_device_sampling=sampling, output_logits=logits)
    chunk = runner.run_step([PromptPiece(0, random_tokens(3))])
    step = runner.run_step((), DecodeRows(*decode_rows(runner, {0: 5})))
    assert (chunk.chunk_tokens is not None, chunk.chunk_logits is not None) == (chosen, True)
    assert (step.decode_tokens is not None, step.decode_logits is not None) == (chosen, scored)
    assert chunk.decode_tokens is chunk.decode_logits is step.chunk_tokens is step.chunk_logits is None


def test_prefill_takes_the_fewest_steps_and_keeps_the_order_of_the_prompts(llama: nn.Module) -> None:
    runner, spec = eager_runner(llama, tiny_config()), inspect_model(llama)
    fill_rows(runner, spec, range(4), None)
    prompts = [random_tokens(length, seed=length) for length in (17, 3, 9)]
    tokens, logits = prefill_prompts(runner, prompts)
    assert tokens is not None and tokens.shape == (3,) and logits is not None and logits.shape == (3, VOCAB)
    # 3, 1 and 2 rows of 8 tokens: the first prompt fills a step and a half, the others fill what it leaves.
    assert sum(runner.graph_calls.values()) == 3
    assert runner.lengths.tolist() == [17, 3, 9]
    for row, prompt in enumerate(prompts):
        alone = eager_runner(llama, tiny_config())
        alone_tokens, alone_logits = prefill_prompts(alone, [prompt])
        assert alone_tokens is not None and alone_logits is not None
        assert np.array_equal(logits[row], alone_logits[0]) and tokens[row] == alone_tokens[0]
