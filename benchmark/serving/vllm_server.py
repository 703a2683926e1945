# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine with the plugin, as its server drives it: the engine in a process of its own, its clients in this one."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from vllm import AsyncEngineArgs, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerBase

from optimum_neuron.artifact.artifact import Artifact

from .workloads import Job, Trace


# Seconds between two looks at who is due, where no token comes: some are by the clock.
PATIENCE = 0.05


class _Counts(StatLoggerBase):
    """What vLLM counts of its steps, since it was last reset."""

    def __init__(self, vllm_config: Any = None, engine_index: int = 0) -> None:
        self.reset()

    def reset(self) -> None:
        self.preemptions = self.prefix_hit_tokens = 0

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        if iteration_stats is not None:
            self.preemptions += iteration_stats.num_preempted_reqs
        if scheduler_stats is not None:
            self.prefix_hit_tokens += scheduler_stats.prefix_cache_stats.hits

    def log_engine_initialized(self) -> None:
        """Nothing to tell."""


class VllmServer:
    """vLLM over an artifact with all of its defaults, async scheduling and prefix caching among them."""

    def __init__(self, name: str, artifact: Path) -> None:
        self.name = name
        opened = Artifact.open(artifact)
        self.vocab_size, self._rows = opened.model.vocab_size, opened.config.batch_size
        self._counts = _Counts()
        self._ids = count()
        self._loop = asyncio.new_event_loop()
        self._engine: AsyncLLM = self._loop.run_until_complete(self._start(artifact))

    async def _start(self, artifact: Path) -> AsyncLLM:
        arguments = AsyncEngineArgs(model=str(artifact))
        return AsyncLLM.from_engine_args(arguments, stat_loggers=[lambda config, index=0: self._counts])

    def close(self) -> None:
        """Ends the engine's process, and what waits for it here."""
        self._engine.shutdown()
        self._loop.run_until_complete(_end_others())
        del self._engine  # else it shuts down again when the interpreter has gone
        gc.collect()
        self._loop.close()

    def serve(self, jobs: Sequence[Job]) -> Trace:
        """Serves a workload to its end, behind one request that does not count."""
        warm = Job("warm", jobs[0].prompt, 8, lambda trace, now: True)  # another system had the caches meanwhile
        self._loop.run_until_complete(self._serve([warm]))
        self._counts.reset()
        trace = self._loop.run_until_complete(self._serve(jobs))
        trace.counters = {
            "preemptions": self._counts.preemptions,
            "prefix_hit_tokens": self._counts.prefix_hit_tokens,
        }
        return trace

    async def _serve(self, jobs: Sequence[Job]) -> Trace:
        trace, waiting, changed = Trace(rows=self._rows), list(jobs), asyncio.Event()
        running: set[asyncio.Task[None]] = set()
        while waiting or running:
            now = time.perf_counter()
            for job in [job for job in waiting if job.due(trace, now)]:
                waiting.remove(job)
                trace.submitted[job.name] = now
                running.add(asyncio.create_task(self._follow(job, trace, changed)))
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(changed.wait(), PATIENCE)
            changed.clear()
            for task in [task for task in running if task.done()]:
                running.remove(task)
                task.result()  # raises what vLLM raised
        return trace

    async def _follow(self, job: Job, trace: Trace, changed: asyncio.Event) -> None:
        """Sends a request, and notes when its tokens come."""
        params = SamplingParams(
            temperature=0, max_tokens=job.new_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        prompt = TokensPrompt(prompt_token_ids=job.prompt.tolist())
        try:
            async for output in self._engine.generate(prompt, params, f"{job.name}-{next(self._ids)}"):
                times = [time.perf_counter()] * len(output.outputs[0].token_ids)
                trace.tokens.setdefault(job.name, []).extend(times)
                changed.set()
        finally:
            changed.set()


async def _end_others() -> None:
    """Cancels all other tasks of this loop, and waits for them."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
