# SPDX-License-Identifier: Apache-2.0
"""Outputs of a run are those of the next one, too: whoever keeps any copies it, and the cpu target does use its memory again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from helpers import VOCAB, Opener, decode_rows, random_tokens
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList

from optimum_neuron.core import PromptPiece, Request
from optimum_neuron.engine.engine import Engine
from optimum_neuron.runtime.generation import GenerationLoop
from optimum_neuron.runtime.golden import replay
from optimum_neuron.runtime.prefill import prefill_prompts
from optimum_neuron.runtime.runner import GraphRunner
from optimum_neuron.runtime.token_choice import HostChoice, OnDeviceChoice
from optimum_neuron.step.spec import SamplingParams
from optimum_neuron.targets import Executable


LENGTHS, NEW = (21, 5, 9), 6
SAMPLED = SamplingParams(40, 0.95, 0.9)


class OneMemory:
    """An executable whose runs, of all graphs, return their outputs in the same memory, and spoil it before."""

    runs_ahead = False

    def __init__(self, executable: Executable) -> None:
        self._executable = executable
        self._memory = np.empty(1 << 20, np.uint8)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executable, name)

    def run(self, graph: str, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        self._memory.fill(0xFF)  # NaN, and no token
        start, places = 0, []
        for output in self._executable.run(graph, inputs):
            places.append(self._memory[start : start + output.nbytes].view(output.dtype).reshape(output.shape))
            places[-1][...] = output
            start += -(-output.nbytes // 64) * 64
        return tuple(places)


class Keeper(LogitsProcessor):
    """Changes what it is given in place, and keeps it."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, 5] += 1.0
        self.kept.append(scores)
        return scores


def loop(runner: GraphRunner, choice: OnDeviceChoice | HostChoice) -> Tensor:
    prompts = [random_tokens(length, seed=length) for length in LENGTHS]
    width = max(LENGTHS)
    ids = torch.stack([torch.from_numpy(np.pad(each, (width - len(each), 0))) for each in prompts])
    torch.manual_seed(7)
    criteria = StoppingCriteriaList([MaxLengthCriteria(width + NEW)])
    return GenerationLoop(runner, choice, criteria, None).generate_tokens(ids, prompts, width + NEW)


def on_device(runner: GraphRunner) -> list[Any]:
    return [loop(runner, OnDeviceChoice(SAMPLED))]


def on_host(runner: GraphRunner, *keepers: Keeper) -> list[Any]:
    choice = HostChoice(LogitsProcessorList(keepers), bool(keepers), [], [])
    sequences = loop(runner, choice)
    assert choice.scores is not None and choice.logits is not None
    return [sequences, *choice.scores, *choice.logits, *(each for keeper in keepers for each in keeper.kept)]


def with_processors(runner: GraphRunner) -> list[Any]:
    return on_host(runner, Keeper())


def by_engine(runner: GraphRunner) -> list[Any]:
    engine = Engine(runner, vocab_size=VOCAB, seed=3)
    for number, length in enumerate((5, 21, 9, 17)):
        options: dict[str, Any] = {"sampling": SAMPLED if number % 2 else SamplingParams(), "logprobs": number == 2}
        options["processors"] = LogitsProcessorList([Keeper()]) if number == 3 else None
        prompt = random_tokens(length, seed=length)
        engine.add_request(Request(request_id=str(number), prompt_token_ids=prompt, max_new_tokens=NEW, **options))
    return [event._replace(started=None) for event in engine.run_requests()]


def forward(runner: GraphRunner) -> list[Any]:
    runner.reset_slots()
    found = prefill_prompts(runner, [random_tokens(length, seed=length) for length in LENGTHS])
    runner.reset_slots()
    return list(found)


def replayed(runner: GraphRunner) -> list[Any]:
    return [each for step in replay(runner, random_tokens(21), NEW) for each in step]


READERS = [on_device, on_host, with_processors, by_engine, forward, replayed]


@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__name__)
def test_whoever_reads_outputs_copies_what_it_keeps(
    open_runner: Opener, read: Callable[[GraphRunner], list[Any]]
) -> None:
    plain = open_runner("llama", top_logprobs=2)
    again = GraphRunner(OneMemory(plain.executable), plain.config, list(plain.family))
    expected, found = read(plain), read(again)
    assert len(expected) == len(found)
    for one, other in zip(expected, found, strict=True):
        assert np.array_equal(one, other) if isinstance(one, Tensor | np.ndarray) else one == other


def test_the_cpu_target_uses_the_memory_of_its_outputs_again(open_runner: Opener) -> None:
    runner = open_runner("llama", "cpu")
    first = runner.run_step([PromptPiece(0, random_tokens(5))])
    second = runner.run_step((), decode_rows(runner, {0: 5}))
    third = runner.run_step((), decode_rows(runner, {0: 5}))
    assert second.decode_tokens is third.decode_tokens and second.decode_logits is third.decode_logits
    assert first.chunk_tokens is not None and second.decode_tokens is not None
    # Of all graphs, as large as that of the largest.
    assert first.chunk_tokens.base is second.decode_tokens.base
