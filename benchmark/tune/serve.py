# SPDX-License-Identifier: Apache-2.0
"""Serves a trace by the engine in its own thread, as the server has it, each request when it is due."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from optimum_neuron.engine.engine import Engine
from optimum_neuron.engine.request import Request
from optimum_neuron.engine.service import EngineService
from optimum_neuron.engine.step import TokenEvent
from optimum_neuron.engine.stream import Item
from optimum_neuron.generate import NeuronModelForCausalLM
from optimum_neuron.tools.tune.answers import Answer, Figures
from optimum_neuron.tools.tune.trace import Trace, traced_request


def serve(artifact: Path, trace: Trace) -> Figures:
    """What users get.

    Raises:
        RuntimeError: a request failed.
    """
    model = NeuronModelForCausalLM.from_pretrained(artifact)
    vocab_size = model.artifact.model.vocab_size
    prompts = trace.prompts(vocab_size)
    model.runner.warm_up()
    answers = [Answer(request.arrival) for request in trace.requests]
    failures: list[Item] = []
    # As servers do: or else the collector looks through all that was loaded, in the middle of a step.
    gc.collect()
    gc.freeze()
    with EngineService(Engine(model.runner, vocab_size=vocab_size)) as service:
        _warm(service)
        start = time.perf_counter()
        for number, answer in enumerate(answers):
            answer.arrival += start
            time.sleep(max(0.0, answer.arrival - time.perf_counter()))
            service.subscribe(traced_request(trace, prompts, number), _note(answer, failures))
    gc.unfreeze()
    if failures:
        raise RuntimeError(f"{len(failures)} requests of {len(answers)} failed: {failures[0]}")
    return Figures.of(answers)


def _note(answer: Answer, failures: list[Item]) -> Callable[[Item], None]:
    def put(item: Item) -> None:
        if isinstance(item, TokenEvent):
            answer.times.append(time.perf_counter())
        else:
            failures.append(item)

    return put


def _warm(service: EngineService) -> None:
    request = Request(request_id="warm", prompt_token_ids=np.arange(64, dtype=np.int32), max_new_tokens=8)
    for _ in service.submit(request):
        pass
