# SPDX-License-Identifier: Apache-2.0
"""A request is a function of its own tokens to the last bit, in steps that decode and take in prompts at once, too; and their graphs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from helpers import (
    ARCHITECTURES,
    CHUNK_SIZE,
    LENGTH,
    Opener,
    Recorder,
    as_tensor,
    decode_rows,
    decode_tokens,
    eager_runner,
    examples,
    fill_rows,
    prefill_pieces,
    random_tokens,
    read_states,
    tiny_config,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from optimum_neuron.config import NeuronConfig
from optimum_neuron.core import PromptPiece
from optimum_neuron.runtime.runner import GraphRunner
from optimum_neuron.step.family import GraphFamily, rows_needed
from optimum_neuron.step.model_spec import ModelSpec
from optimum_neuron.step.spec import graph_specs


ON_TARGETS = [*((name, "eager") for name in ARCHITECTURES), pytest.param("llama", "cpu", marks=pytest.mark.slow)]


def mixed(runner: GraphRunner, chunks: dict[int, np.ndarray], decode: dict[int, int]) -> dict[int, Tensor]:
    """One step; returns the logits of every slot that took part."""
    output = runner.run_step(
        [PromptPiece(slot, tokens) for slot, tokens in chunks.items()], decode_rows(runner, decode)
    )
    assert output.decode_logits is not None and output.chunk_logits is not None
    logits = {slot: as_tensor(output.decode_logits[slot]) for slot in decode}
    return logits | {slot: as_tensor(output.chunk_logits[row]) for row, slot in enumerate(chunks)}


@pytest.mark.parametrize(("name", "target"), ON_TARGETS)
def test_a_mixed_step_equals_a_decode_and_a_chunk_step(
    open_runner: Opener, tiny_specs: dict[str, ModelSpec], name: str, target: str
) -> None:
    runner, spec, prompt = open_runner(name, target), tiny_specs[name], random_tokens(9, seed=4)

    def start() -> None:
        runner.reset_slots()
        runner.graph_calls.clear()
        fill_rows(runner, spec, range(4), 0.0)
        prefill_pieces(runner, 0, random_tokens(11), [8, 3])
        prefill_pieces(runner, 1, prompt[:5], [5])
        prefill_pieces(runner, 2, random_tokens(6, seed=5), [6])

    start()
    tokens, decoded = decode_tokens(runner, {0: 7})
    chunk = runner.run_step([PromptPiece(1, prompt[5:])])
    assert chunk.chunk_logits is not None and chunk.chunk_tokens is not None
    expected = {0: decoded[0], 1: as_tensor(chunk.chunk_logits[0])}
    chosen, states = (int(tokens[0]), int(chunk.chunk_tokens[0])), read_states(runner, spec)
    start()
    output = runner.run_step([PromptPiece(1, prompt[5:])], decode_rows(runner, {0: 7}))
    assert output.decode_tokens is not None and output.chunk_tokens is not None
    assert (int(output.decode_tokens[0]), int(output.chunk_tokens[0])) == chosen
    assert runner.graph_calls[f"mixed_chunk{CHUNK_SIZE}_context{LENGTH}"] == 1
    assert runner.lengths.tolist() == [12, 9, 6]
    after = read_states(runner, spec)
    assert all((after[key][:3] - states[key][:3]).abs().max() < 1e-5 for key in after)
    written = enumerate(runner.lengths)
    assert not any(after[key][slot, :, length:].any() for slot, length in written for key in after)
    start()
    results = mixed(runner, {1: prompt[5:]}, {0: 7})
    assert all((results[slot] - expected[slot]).abs().max() < 1e-5 for slot in expected)
    start()
    busy = mixed(runner, {1: prompt[5:]}, {0: 7, 2: 8})
    assert all(torch.equal(busy[slot], results[slot]) for slot in results)


@st.composite
def schedules(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    """Prompt lengths of three slots, and per step the tokens that each slot would take of a prompt, 0 for none."""
    steps = st.lists(st.lists(st.integers(0, 2 * CHUNK_SIZE), min_size=3, max_size=3), min_size=1, max_size=12)
    return draw(st.lists(st.integers(1, 20), min_size=3, max_size=3)), draw(steps)


@pytest.mark.parametrize(
    ("name", "target"), [*ON_TARGETS, ("lfm2", "eager"), pytest.param("gpt_oss", "cpu", marks=pytest.mark.slow)]
)
def test_inside_the_mixed_graph_no_schedule_changes_a_bit(open_runner: Opener, name: str, target: str) -> None:
    shared = open_runner(name, target)
    runner = GraphRunner(shared.executable, shared.config, graph_specs(shared.config), deterministic=True)
    streams = [random_tokens(LENGTH, seed=slot) for slot in range(3)]

    def alone(slot: int, prompt: int, stop: int) -> Tensor:
        """The logits after token `stop - 1` of a stream that nobody else is served beside."""
        runner.reset_slots()
        logits = prefill_pieces(runner, 0, streams[slot][:prompt], [1] * prompt)
        for token in streams[slot][prompt:stop]:
            logits = decode_tokens(runner, {0: int(token)})[1][0]
        return logits

    @examples(25)
    @given(schedules())
    def check(schedule: tuple[list[int], list[list[int]]]) -> None:
        prompts, steps = schedule
        runner.reset_slots()
        last: dict[int, Tensor] = {}
        for wanted in steps:
            chunks: dict[int, np.ndarray] = {}
            for slot, (start, prompt, count) in enumerate(zip(runner.lengths, prompts, wanted, strict=True)):
                piece = streams[slot][start : min(start + count, prompt)]
                taken = [len(chunk) for chunk in chunks.values()]
                if len(piece) and rows_needed([*taken, len(piece)], CHUNK_SIZE) <= 2:
                    chunks[slot] = piece
            decode = {
                slot: int(streams[slot][start])
                for slot, (start, count) in enumerate(zip(runner.lengths, wanted, strict=True))
                if prompts[slot] <= start < LENGTH and count
            }
            if chunks:
                last |= mixed(runner, chunks, decode)
            elif decode:
                logits = decode_tokens(runner, decode)[1]
                last |= {slot: logits[slot] for slot in decode}
        lengths = runner.lengths.tolist()
        for slot, logits in last.items():
            assert torch.equal(logits, alone(slot, min(prompts[slot], lengths[slot]), lengths[slot]))

    check()
    runner.reset_slots()
    assert set(runner.graph_calls) == {f"mixed_chunk{CHUNK_SIZE}_context{LENGTH}"}


STEPS = st.tuples(
    st.lists(st.integers(0, LENGTH - 1), min_size=3, max_size=3),
    st.dictionaries(st.integers(0, 2), st.integers(1, 24), max_size=2),
    st.sets(st.integers(0, 2)),
)


@examples(100)
@given(STEPS)
def test_a_step_runs_in_the_smallest_graph_of_its_kind(step: tuple[list[int], dict[int, int], set[int]]) -> None:
    lengths, counts, decoding = step
    contexts, sizes = (16, LENGTH), (2, 4, 8)
    config = tiny_config(prefill_chunk_buckets=sizes[:-1], context_buckets=contexts)
    graphs = graph_specs(config)
    runner = GraphRunner(Recorder(graphs), config, graphs)
    runner.lengths[:] = lengths
    counts = {slot: min(count, LENGTH - lengths[slot]) for slot, count in counts.items()}
    decoding -= set(counts)
    if rows_needed(counts.values(), 8) > 2 or not (counts or decoding):
        return
    chunks = [PromptPiece(slot, random_tokens(count)) for slot, count in counts.items()]
    runner.run_step(chunks, decode_rows(runner, dict.fromkeys(decoding, 5)) if decoding else None)
    seen = [lengths[slot] + count for slot, count in counts.items()] + [lengths[slot] + 1 for slot in decoding]
    size = next((size for size in sizes if rows_needed(counts.values(), size) <= 2), 0)
    context = next(context for context in contexts if context >= max(seen))
    kind = "token_generation" if not counts else "mixed" if decoding else "chunked_prefill"
    name = f"{kind}_chunk{size}_context{context}" if counts else f"{kind}_context{context}"
    assert dict(runner.graph_calls) == {name: 1}


def test_without_a_mixed_graph_such_a_step_is_refused_with_the_remedy(tiny_models: dict[str, nn.Module]) -> None:
    runner = eager_runner(tiny_models["llama"], tiny_config(mixed_step=False))
    prefill_pieces(runner, 0, random_tokens(3), [3])
    with pytest.raises(ValueError, match=r"no mixed graph: .* without --no-mixed-step"):
        runner.run_step([PromptPiece(1, random_tokens(2))], decode_rows(runner, {0: 5}))
    assert runner.lengths.tolist() == [3, 0, 0]
    with pytest.raises(ValueError, match=r"deterministic=True .* this artifact has none"):
        eager_runner(tiny_models["llama"], runner.config, deterministic=True)


@st.composite
def configs(draw: st.DrawFn) -> NeuronConfig:
    batch, rows = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    chunks = sorted(draw(st.sets(st.integers(1, 24), min_size=1, max_size=3)))
    length = batch + rows * chunks[-1] + draw(st.integers(0, 40))
    return NeuronConfig(
        batch_size=max(batch, rows),
        sequence_length=length + rows,
        prefill_chunk_size=chunks[-1],
        prefill_chunk_buckets=tuple(chunks[:-1]),
        ctx_batch_size=rows,
        context_buckets=tuple(sorted({draw(st.integers(1, length)), length + rows})),
    )


@examples(60)
@given(configs())
def test_every_step_that_a_config_allows_has_a_graph(config: NeuronConfig) -> None:
    graphs = graph_specs(config)
    family, kinds = GraphFamily(graphs), {graph.kind for graph in graphs} - {"token_generation"}
    for context in (1, *(bucket + 1 for bucket in config.context_buckets[:-1]), config.sequence_length):
        family.select("token_generation", context, (), config.kv_blocks)
        for kind in kinds:
            for count in range(1, config.prompt_capacity + 1):
                family.select(kind, max(context, count), [count])
            # Rows of different prompts waste the most: each has a token in a row of its own.
            family.select(kind, context, [config.prefill_chunk_size] * config.ctx_batch_size)
    assert ("mixed" in kinds) == config.mixed_step and "chunked_prefill" in kinds
    with pytest.raises(ValueError, match="no chunked_prefill graph holds prompt chunks of"):
        family.select("chunked_prefill", 1, [config.prompt_capacity + 1])


def test_mixed_graphs_are_exported_by_default_where_two_requests_can_meet() -> None:
    def kinds(**changes: object) -> list[str]:
        family = GraphFamily(graph_specs(tiny_config(prefill_chunk_buckets=(2, 4), **changes)))
        return [graph.name for graph in family.kind("mixed")]

    assert kinds() == [f"mixed_chunk{size}_context{LENGTH}" for size in (2, 4, 8)]
    assert kinds(mixed_step=False) == kinds(batch_size=1, ctx_batch_size=1) == []
    with pytest.raises(ValueError, match="mixed_step=True needs batch_size=2 or more, not batch_size=1"):
        tiny_config(batch_size=1, ctx_batch_size=1, mixed_step=True)
    config = tiny_config()
    assert dataclasses.replace(config, batch_size=3) == config == NeuronConfig.from_dict(config.to_dict())
