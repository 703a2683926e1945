# SPDX-License-Identifier: Apache-2.0
"""The systems that serve a workload: this engine under a policy, and transformers' continuous batching. Reads no results."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from transformers import ContinuousBatchingConfig, GenerationConfig

from optimum_neuron.engine.engine import Engine
from optimum_neuron.engine.policy import SchedulerOptions
from optimum_neuron.engine.request import Request
from optimum_neuron.generate import NeuronModelForCausalLM

from .workloads import Job, Trace


class Server(Protocol):
    """Serves a workload to its end.

    Attributes:
        vocab_size: tokens that its model knows.
    """

    name: str

    @property
    def vocab_size(self) -> int: ...

    def serve(self, jobs: Sequence[Job]) -> Trace: ...


@dataclass
class OurServer:
    """The engine over an artifact, under one policy."""

    name: str
    model: NeuronModelForCausalLM
    options: SchedulerOptions

    @property
    def vocab_size(self) -> int:
        return self.model.artifact.model.vocab_size

    def serve(self, jobs: Sequence[Job]) -> Trace:
        self._run([Job("warm", jobs[0].prompt, 8, lambda trace, now: True)])  # another system had the caches meanwhile
        return self._run(jobs)

    def _run(self, jobs: Sequence[Job]) -> Trace:
        runner = self.model.runner
        runner.graph_calls.clear()
        engine = Engine(runner, self.options, vocab_size=self.vocab_size)
        trace, waiting, sent = Trace(rows=self.model.neuron_config.batch_size), list(jobs), list[Job]()
        while waiting or engine.has_work:
            now = time.perf_counter()
            for job in [job for job in waiting if job.due(trace, now)]:
                waiting.remove(job)
                trace.submitted[job.name] = now
                sent.append(job)
                engine.add_request(
                    Request(request_id=job.name, prompt_token_ids=job.prompt, max_new_tokens=job.new_tokens)
                )
            step = engine.scheduler.schedule()  # changes nothing: only to note the kind
            start = time.perf_counter()
            events = engine.step()
            end = time.perf_counter()
            if step is not None:
                trace.steps.append((step.graph.kind, start, end))
            for event in events:
                trace.tokens.setdefault(event.request_id, []).append(end)
            sent = [job for job in sent if trace.count(job.name) < job.new_tokens]
            _note_cache(trace, engine, sent)
        trace.counters = asdict(engine.statistics) | {"graph_calls": dict(runner.graph_calls)}
        return trace


def _note_cache(trace: Trace, engine: Engine, live: Iterable[Job]) -> None:
    """Adds what requests have of the cache behind a step, and what they fill of it."""
    states = [engine.scheduler.state(job.name) for job in live]
    trace.taken_tokens += engine.scheduler.slots.used * engine.config.block_length
    trace.filled_tokens += sum(state.cached for state in states if state.slot is not None)


@dataclass
class TransformersServer:
    """transformers' continuous batching on the same checkpoint, in its own thread.

    Attributes:
        step_tokens: tokens of a step, decodes and prompt tokens together: it mixes both, like this engine.
        slots: requests at a time.
        cache_tokens: tokens that its cache holds.
    """

    name: str
    model: Any
    step_tokens: int
    slots: int
    cache_tokens: int
    page: int = 128

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.vocab_size)

    def serve(self, jobs: Sequence[Job]) -> Trace:
        config = ContinuousBatchingConfig(
            max_batch_tokens=self.step_tokens,
            page_size=self.page,
            num_blocks=-(-self.cache_tokens // self.page) + self.slots,
            max_requests_per_batch=self.slots,
            allow_block_sharing=False,
        )
        generation = GenerationConfig(max_new_tokens=1, do_sample=False, eos_token_id=-1)
        manager = self.model.init_continuous_batching(generation, continuous_batching_config=config)
        manager.start()
        try:
            return self._serve(manager, list(jobs))
        finally:
            manager.stop(block=True)

    def _serve(self, manager: Any, waiting: list[Job]) -> Trace:
        trace, open_requests = Trace(), 0
        while waiting or open_requests:
            now = time.perf_counter()
            for job in [job for job in waiting if job.due(trace, now)]:
                waiting.remove(job)
                trace.submitted[job.name] = now
                open_requests += 1
                manager.add_request(
                    job.prompt.tolist(),
                    request_id=job.name,
                    max_new_tokens=job.new_tokens,
                    streaming=True,
                    record_timestamps=True,
                )
            output = manager.get_result(timeout=0.002)
            if output is None:
                if not manager.is_running():
                    raise RuntimeError("transformers' continuous batching stopped; see its log")
                continue
            if output.error is not None:
                raise RuntimeError(f"transformers failed request {output.request_id}: {output.error}")
            trace.tokens[output.request_id] = list(output.timestamps)
            open_requests -= output.is_finished()
        return trace
