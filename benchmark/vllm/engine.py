# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine in this process, its calls noted, under loads that keep all its steps alike. Computes no numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import numpy as np
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind

from .steps import CORE, GRAPH, OUTPUTS, RUNNER, SCHEDULER, Recorder, Step, steps_of


PROMPT_TOKENS = 32
# Tokens that each request has before steps are noted.
WARM_TOKENS = 4


class ObservedEngine:
    """An engine over an artifact; needs VLLM_ENABLE_V1_MULTIPROCESSING=0.

    Args:
        asynchronous: whether vLLM schedules a step while the last one runs.
    """

    def __init__(self, artifact: Path, *, asynchronous: bool) -> None:
        llm = LLM(str(artifact), async_scheduling=asynchronous, enable_prefix_caching=False)
        self._engine = llm.llm_engine
        self._llm = llm  # ends the engine when it goes
        core = self._engine.engine_core.engine_core
        runner = core.model_executor.driver_worker.worker.model_runner
        self._slots: int = runner.runner.config.batch_size
        self._length: int = runner.runner.config.sequence_length
        self._vocabulary: int = llm.model_config.get_vocab_size()
        self._random = np.random.default_rng(0)
        self._ids = count()
        self._tokens: dict[str, int] = {}  # new tokens of each request that is not finished
        self._recorder = Recorder()
        for owner, names, part in (
            (self._engine, ("step",), OUTPUTS),
            (core, ("step_fn",), CORE),
            (core.scheduler, ("schedule", "update_from_output"), SCHEDULER),
            (runner, ("execute", "sample"), RUNNER),
            (runner.runner.executable, ("run",), GRAPH),
        ):
            for name in names:
                self._recorder.watch(owner, name, part)

    def decode(self, requests: int, steps: int) -> list[Step]:
        """Steps in which so many requests decode, and nothing else happens."""
        with self._decoding(requests):
            return self._observe(steps, newcomers=False)

    def mixed(self, steps: int) -> list[Step]:
        """Steps in which all slots but one decode, and the last one takes in long prompts, one after another."""
        with self._decoding(self._slots - 1):
            return self._observe(steps, newcomers=True)

    @contextmanager
    def _decoding(self, requests: int) -> Iterator[None]:
        """Some requests past their prompts, which end when the block does."""
        self._tokens.clear()
        for _ in range(requests):
            self._add(PROMPT_TOKENS, self._length - PROMPT_TOKENS)
        while min(self._tokens.values()) < WARM_TOKENS:
            self._step()
        try:
            yield
        finally:
            self._engine.abort_request(list(self._tokens))
            while self._engine.has_unfinished_requests():
                self._step()

    def _observe(self, steps: int, *, newcomers: bool) -> list[Step]:
        spans, newcomer = self._recorder.spans, None
        spans.clear()
        self._recorder.on = True
        while sum(span.part == GRAPH for span in spans) <= steps:
            if newcomers and newcomer not in self._tokens:
                newcomer = self._add(3 * self._length // 4, 1)
            self._step()
        self._recorder.on = False
        return steps_of(spans)

    def _add(self, prompt_tokens: int, new_tokens: int) -> str:
        name = str(next(self._ids))
        prompt = self._random.integers(0, self._vocabulary, prompt_tokens).tolist()
        params = SamplingParams(
            temperature=0, max_tokens=new_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        self._engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), params)
        self._tokens[name] = 0
        return name

    def _step(self) -> None:
        for output in self._engine.step():
            if output.finished:
                self._tokens.pop(output.request_id, None)
            elif output.request_id in self._tokens:
                self._tokens[output.request_id] += len(output.outputs[0].token_ids)
