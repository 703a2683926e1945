# SPDX-License-Identifier: Apache-2.0
"""Steps that are started before the one ahead of them is read: the same tokens, one read per token, one wasted step at most."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import Opener, Recorder, decode_rows, random_tokens, tiny_config
from running_ahead import AheadOf, ahead_of
from torch import Tensor
from transformers import EosTokenCriteria, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from optimum_neuron.core import PromptPiece
from optimum_neuron.runtime.generation import GenerationLoop
from optimum_neuron.runtime.runner import GraphRunner
from optimum_neuron.runtime.step_tensors import FROM_SLOT, DecodeRows
from optimum_neuron.runtime.token_choice import HostChoice, OnDeviceChoice
from optimum_neuron.step.model_spec import ModelSpec
from optimum_neuron.step.spec import GREEDY, SamplingParams, graph_specs


SAMPLED = SamplingParams(40, 0.95, 0.9)
LENGTHS, NEW = (21, 5, 9), 12
PAD = 0


class Streamer(BaseStreamer):
    """Keeps what it gets, and how many steps had been started then."""

    def __init__(self, started: Callable[[], int] = lambda: 0) -> None:
        self.got: list[list[int]] = []
        self.started: list[int] = []
        self._count = started

    def put(self, value: Tensor) -> None:
        self.got.append(value.tolist())
        self.started.append(self._count())

    def end(self) -> None:
        self.got.append([])


def run(
    runner: GraphRunner,
    sampling: SamplingParams = GREEDY,
    ends: set[int] | None = None,
    streamer: BaseStreamer | None = None,
    criteria: tuple[Any, ...] = (),
    lengths: tuple[int, ...] = LENGTHS,
) -> Tensor:
    """generate() of prompts that are padded on the left."""
    prompts = [random_tokens(length, seed=length) for length in lengths]
    width = max(lengths)
    ids = torch.stack([torch.from_numpy(np.pad(each, (width - len(each), 0))) for each in prompts])
    every = StoppingCriteriaList([MaxLengthCriteria(width + NEW), *criteria])
    if ends is not None:
        every.append(EosTokenCriteria(torch.tensor(sorted(ends))))
    loop = GenerationLoop(runner, OnDeviceChoice(sampling), every, None if ends is None else PAD, streamer)
    torch.manual_seed(7)
    return loop.generate_tokens(ids, prompts, width + NEW)


@pytest.mark.parametrize("target", ["eager", "cpu"])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_tokens_streams_and_random_numbers_are_those_of_one_step_at_a_time(
    open_runner: Opener, target: str, sampling: SamplingParams
) -> None:
    runner = open_runner("llama", target)
    plain = run(runner, sampling)
    # Rows end at different steps; the last one before the length does.
    first, second, third = (plain[row, max(LENGTHS) + step].item() for row, step in ((0, 2), (1, 5), (2, 7)))
    for ends in (None, {first}, {first, second, third}, {int(each) for each in plain[:, max(LENGTHS)]}):
        found = []
        ahead, _ = ahead_of(runner)
        for each in (runner, ahead):
            streamer = Streamer()
            sequences = run(each, sampling, ends, streamer)
            found.append((sequences.tolist(), streamer.got, torch.rand(1).item()))
            assert not each.lengths.any()
        assert found[0] == found[1]


def steps_of(executable: AheadOf, runner: GraphRunner) -> list[int]:
    """The numbers of decode steps among all that were started."""
    decodes = sum(count for name, count in runner.graph_calls.items() if name.startswith("token"))
    return list(range(len(executable.transfers) - decodes, len(executable.transfers)))


def test_each_step_is_started_before_the_numbers_of_the_one_ahead_of_it_are_read(open_runner: Opener) -> None:
    runner, executable = ahead_of(open_runner("llama"))
    streamer = Streamer(lambda: len(executable.transfers))
    run(runner, streamer=streamer)
    first, *others = steps_of(executable, runner)
    assert len(others) + 1 == NEW - 1  # none is wasted where the length ends it
    expected = [f"start {first}"]
    for number in others:
        expected += [f"start {number}", f"read {number - 1}"]
    assert executable.log[-len(expected) - 1 :] == [*expected, f"read {others[-1]}"]
    # A streamer gets a token while the step that follows it runs, but the first and the last.
    before = first
    assert streamer.started == [before, *(before + 2 + step for step in range(NEW - 2)), before + NEW - 1]

    decodes = [first, *others]
    assert [executable.transfers[number] for number in decodes] == [["decode.tokens"]] * len(decodes)
    prompts = executable.transfers[: decodes[0]]
    assert all(names in ([], ["chunk.tokens"]) for names in prompts)
    assert [] in prompts  # of a step in which no prompt ends nothing is read


def test_the_end_costs_one_step_that_nobody_reads(open_runner: Opener) -> None:
    runner, executable = ahead_of(open_runner("llama"))
    plain = run(open_runner("llama"), lengths=(21,))
    end = plain[0, 21 + 4].item()
    steps = plain[0, 21:].tolist().index(end)
    found = run(runner, ends={end}, lengths=(21,))
    assert found.tolist() == [plain[0, : 21 + steps + 1].tolist()]
    decodes = steps_of(executable, runner)
    assert [bool(executable.transfers[number]) for number in decodes] == [True] * steps + [False]


def test_who_may_look_at_more_than_tokens_gets_each_at_once(open_runner: Opener) -> None:
    runner, executable = ahead_of(open_runner("llama"))
    assert torch.equal(run(runner, criteria=(lambda ids, scores: False,)), run(open_runner("llama")))
    decodes = steps_of(executable, runner)
    expected = [f"{what} {number}" for number in decodes for what in ("start", "read")]
    assert executable.log[-len(expected) :] == expected


def test_a_host_that_chooses_reads_logits_and_feeds_its_tokens(open_runner: Opener) -> None:
    both = []
    plain = open_runner("llama")
    ahead, executable = ahead_of(plain)
    for runner in (plain, ahead):
        choice = HostChoice(LogitsProcessorList(), do_sample=False)
        prompt = random_tokens(9)
        loop = GenerationLoop(runner, choice, StoppingCriteriaList([MaxLengthCriteria(14)]), None)
        both.append(loop.generate_tokens(torch.from_numpy(prompt)[None], [prompt], 14).tolist())
    assert both[0] == both[1]
    assert executable.transfers[-1] == ["decode.tokens", "decode.logits"]


def test_a_streamer_that_raises_leaves_slots_and_random_numbers_as_they_are_then(open_runner: Opener) -> None:
    class Broken(Streamer):
        def put(self, value: Tensor) -> None:
            super().put(value)
            if len(self.got) == 4:
                raise KeyboardInterrupt

    drawn = []
    plain = open_runner("llama")
    ahead, _ = ahead_of(plain)
    for runner in (plain, ahead):
        with pytest.raises(KeyboardInterrupt):
            run(runner, SAMPLED, streamer=Broken())
        drawn.append(torch.rand(1).item())
        assert not runner.lengths.any()
    assert drawn[0] == drawn[1]
    assert torch.equal(run(plain, SAMPLED), run(ahead, SAMPLED))


def test_a_mixed_step_takes_slots_own_tokens_beside_a_prompt_in_several_rows(open_runner: Opener) -> None:
    both = []
    plain = open_runner("llama")
    ahead, _ = ahead_of(plain)
    for runner in (plain, ahead):
        runner.reset_slots()
        prompt = random_tokens(13, seed=3)
        first = runner.run_step([PromptPiece(1, prompt)]).chunk_tokens  # two rows of one slot
        assert first is not None
        rows = DecodeRows(*decode_rows(runner, {1: FROM_SLOT if runner is ahead else int(first[0])}))
        output = runner.run_step([PromptPiece(0, random_tokens(11, seed=4))], rows)
        assert output.decode_tokens is not None and output.chunk_tokens is not None
        both.append((int(output.decode_tokens[1]), output.chunk_tokens.tolist()))
    assert both[0] == both[1]


def test_no_step_takes_a_token_that_the_model_may_not_take() -> None:
    """A model with more logits than embeddings: what it chooses is checked first."""
    config = tiny_config()
    graphs = graph_specs(config)
    for known, ahead in ((300, True), (299, False)):
        spec = ModelSpec(300, (), num_embeddings=known)
        assert GraphRunner(AheadOf(Recorder(graphs), graphs), config, graphs, spec).runs_ahead is ahead
    assert not GraphRunner(Recorder(graphs), config, graphs).runs_ahead
    config = tiny_config(on_device_sampling=False)
    graphs = graph_specs(config)
    assert not GraphRunner(AheadOf(Recorder(graphs), graphs), config, graphs).runs_ahead
