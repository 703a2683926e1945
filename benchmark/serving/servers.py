# SPDX-License-Identifier: Apache-2.0
"""The systems that serve a workload: this engine under a policy, and transformers' continuous batching. Reads no results."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from optimum_neuron.core import Request
from optimum_neuron.engine.engine import Engine
from optimum_neuron.engine.policy import SchedulerOptions
from optimum_neuron.generate.model import NeuronModelForCausalLM

from ..systems import continuous_batching, next_output
from .workloads import Job, Trace


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
        self._serve([Job("warm", jobs[0].prompt, 8)])  # another system had the caches meanwhile
        return self._serve(jobs)

    def _serve(self, jobs: Sequence[Job]) -> Trace:
        runner = self.model.runner
        runner.graph_calls.clear()
        engine = Engine(runner, self.options, vocab_size=self.vocab_size)
        trace, waiting = Trace(), list(jobs)
        while waiting or engine.has_work:
            for job in trace.take_due(waiting):
                engine.add_request(
                    Request(request_id=job.name, prompt_token_ids=job.prompt, max_new_tokens=job.new_tokens)
                )
            step = engine.scheduler.schedule()  # changes nothing: only to note the kind
            start = time.perf_counter()
            events = engine.step()
            end = time.perf_counter()
            if step is not None:
                trace.steps.append((step.graph.kind, end - start))
            for event in events:
                trace.tokens.setdefault(event.request_id, []).append(end)
        trace.counters = asdict(engine.statistics) | {"graph_calls": dict(runner.graph_calls)}
        return trace


@dataclass
class TransformersServer:
    """transformers' continuous batching on the same checkpoint, in its own thread; sizes as `continuous_batching` has them."""

    name: str
    model: Any
    step_tokens: int
    slots: int
    cache_tokens: int

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.vocab_size)

    def serve(self, jobs: Sequence[Job]) -> Trace:
        trace, waiting, open_requests = Trace(), list(jobs), 0
        with continuous_batching(self.model, self.step_tokens, self.slots, self.cache_tokens) as manager:
            while waiting or open_requests:
                for job in trace.take_due(waiting):
                    open_requests += 1
                    options = {"request_id": job.name, "max_new_tokens": job.new_tokens}
                    manager.add_request(job.prompt.tolist(), **options, streaming=True, record_timestamps=True)
                output = next_output(manager)
                if output is not None:
                    trace.tokens[output.request_id] = list(output.timestamps)
                    open_requests -= output.is_finished()
        return trace


Server = OurServer | TransformersServer
