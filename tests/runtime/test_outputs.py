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
        self._returned: dict[str, tuple[np.ndarray, ...]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executable, name)

    def run(self, graph: str, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        self._memory.fill(0xFF)  # NaN, and no token
        outputs = self._executable.run(graph, inputs)
        if graph not in self._returned:
            self._returned[graph] = tuple(self._places(outputs))
        for own, output in zip(self._returned[graph], outputs, strict=True):
            own[...] = output
        return self._returned[graph]

    def _places(self, outputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        start, places = 0, []
        for output in outputs:
            end = start + output.nbytes
            places.append(self._memory[start:end].view(output.dtype).reshape(output.shape))
            start = -(-end // 64) * 64
        return places


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


def on_host(runner: GraphRunner) -> list[Any]:
    keeper = Keeper()
    choice = HostChoice(LogitsProcessorList([keeper]), True, [], [])
    sequences = loop(runner, choice)
    assert choice.scores is not None and choice.logits is not None
    return [sequences, *choice.scores, *choice.logits, *keeper.kept]


def kept_without_processors(runner: GraphRunner) -> list[Any]:
    choice = HostChoice(LogitsProcessorList(), False, [], [])
    sequences = loop(runner, choice)
    assert choice.scores is not None and choice.logits is not None
    return [sequences, *choice.scores, *choice.logits]


def by_engine(runner: GraphRunner) -> list[Any]:
    engine = Engine(runner, vocab_size=VOCAB, seed=3)
    for number, length in enumerate((5, 21, 9, 17)):
        host = LogitsProcessorList([Keeper()]) if number == 3 else None
        engine.add_request(
            Request(
                request_id=str(number),
                prompt_token_ids=random_tokens(length, seed=length),
                max_new_tokens=NEW,
                sampling=SAMPLED if number % 2 else SamplingParams(),
                processors=host,
                logprobs=number == 2,
            )
        )
    return [event._replace(started=None) for event in engine.run_requests()]


def forward(runner: GraphRunner) -> list[Any]:
    runner.reset_slots()
    found = prefill_prompts(runner, [random_tokens(length, seed=length) for length in LENGTHS])
    runner.reset_slots()
    return list(found)


def replayed(runner: GraphRunner) -> list[Any]:
    return [each for step in replay(runner, random_tokens(21), NEW) for each in step]


READERS = [on_device, on_host, kept_without_processors, by_engine, forward, replayed]


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
