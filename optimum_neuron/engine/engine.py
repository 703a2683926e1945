# SPDX-License-Identifier: Apache-2.0
"""The engine: schedule a step, run it, hand out its tokens. Knows no text, no files and no threads."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from ..runtime.runner import Chunk, DecodeRows, GraphRunner
from .policy import SchedulerOptions
from .request import Request
from .sampler import RequestSampler, check_sampling
from .scheduler import Scheduler
from .statistics import Statistics
from .step import ScheduledChunk, ScheduledDecode, Step, TokenEvent


class Engine:
    """Continuous batching over the slots of one artifact. To be used by one thread at a time; see `EngineService`.

    Args:
        runner: the graphs and slots, which nobody else uses while the engine has requests.
        options: how steps are filled.
        vocab_size: of the model.
        seed: seeds the requests that bring no seed of their own, in the order of their arrival.

    Raises:
        ValueError: the artifact cannot do what the options ask.

    Attributes:
        options: as they were given.
        scheduler: the requests' progress.
        statistics: what was counted so far.
    """

    def __init__(
        self,
        runner: GraphRunner,
        options: SchedulerOptions | None = None,
        *,
        vocab_size: int,
        seed: int | None = None,
    ) -> None:
        self.runner = runner
        self.config = runner.config
        self.options = options or SchedulerOptions()
        # A decode row computes other last bits than a chunk row: only prompts are reused where bits matter.
        used = replace(self.options, reuse_generated=False) if runner.deterministic else self.options
        if not runner.reuses_prefixes:
            used = replace(used, prefix_reuse=False)
        self.scheduler = Scheduler(runner.config, used)
        self.statistics = Statistics()
        self._vocab_size = vocab_size
        self._seeds = np.random.SeedSequence(seed)
        self._samplers: dict[str, RequestSampler] = {}
        self._arrived: dict[str, float] = {}
        slots = self.config.batch_size
        self._rows = DecodeRows(
            token_ids=np.zeros(slots, dtype=np.int32),
            active=np.zeros(slots, dtype=bool),
            sampling_params=np.zeros((slots, 3), dtype=np.float32),
            uniforms=np.zeros(slots, dtype=np.float32),
        )
        runner.reset_all()

    @property
    def has_work(self) -> bool:
        """Whether any request is not finished."""
        return self.scheduler.has_work

    def check(self, request: Request) -> None:
        """Raises ValueError where a request could never be served; changes nothing."""
        check_sampling(request, self.config, self._vocab_size)
        self.scheduler.check(request)

    def add_request(self, request: Request) -> None:
        """Queues a request.

        Raises:
            ValueError: the request could never be served; the reason and the remedy are named.
        """
        check_sampling(request, self.config, self._vocab_size)
        self.scheduler.add(request)
        seed = self._seeds.spawn(1)[0] if request.seed is None else np.random.SeedSequence(request.seed)
        self._samplers[request.request_id] = RequestSampler(request, self.config, self._vocab_size, seed)
        self._arrived[request.request_id] = time.perf_counter()

    def abort(self, request_id: str) -> bool:
        """Ends a request in any state; False where no such request is live."""
        slot = self.scheduler.state(request_id).slot if request_id in self._samplers else None
        if not self.scheduler.abort(request_id):
            return False
        if slot is not None:
            self._rows.active[slot] = False
        self._forget(request_id)
        self.statistics.aborted += 1
        return True

    def abort_all(self) -> None:
        """Ends all requests."""
        for request_id in list(self._samplers):
            self.abort(request_id)

    def step(self) -> list[TokenEvent]:
        """Runs one step; returns the tokens that requests got from it, none where there is nothing to do.

        Whatever fails in it ends all requests and voids all slots: how far the cache was written is then unknown.
        """
        step = self.scheduler.schedule()
        if step is None:
            return []
        try:
            return self._run(step)
        except BaseException:
            self.abort_all()
            self.scheduler.slots.clear()
            raise

    def _run(self, step: Step) -> list[TokenEvent]:
        start = time.perf_counter()
        chunks = [self._chunk(chunk, start) for chunk in step.chunks]
        output = self.runner.step(chunks, self._decode_rows(step.decodes) if step.decodes else None)
        decode_tokens = self._chosen(step.decodes, output.decode_tokens, output.decode_logits)
        chunk_tokens = self._chosen(step.chunks, output.chunk_tokens, output.chunk_logits)
        events = self.scheduler.commit(step, decode_tokens, chunk_tokens, time.perf_counter() - start)
        return self._note(step, events)

    def run(self) -> Iterator[TokenEvent]:
        """Steps until all requests are finished, and yields their tokens."""
        while self.has_work:
            yield from self.step()

    def _chunk(self, chunk: ScheduledChunk, now: float) -> Chunk:
        sampler = self._samplers[chunk.request_id]
        if chunk.is_first:
            self.statistics.queue_seconds.add(now - self._arrived[chunk.request_id])
            if chunk.reuse is None:
                self.runner.reset(chunk.slot)
            else:
                self.runner.reuse(chunk.slot, chunk.reuse.source_slot, chunk.reuse.length)
        tokens = sampler.request.prompt_token_ids[chunk.start : chunk.start + chunk.count]
        # Drawn only where a token is: the n-th draw of a request is its n-th token's, however its prompt was cut.
        return Chunk(chunk.slot, tokens, sampler.params, sampler.uniform() if chunk.is_last else 0.0)

    def _decode_rows(self, decodes: Sequence[ScheduledDecode]) -> DecodeRows:
        for decode in decodes:
            sampler = self._samplers[decode.request_id]
            if sampler.draws:
                self._rows.uniforms[decode.slot] = sampler.uniform()
        return self._rows

    def _chosen(
        self, rows: Sequence[ScheduledDecode | ScheduledChunk], tokens: Tensor | None, logits: Tensor | None
    ) -> list[int]:
        """The token of each decode or chunk, in their order: decode rows are slots, chunk rows the step's chunks."""
        on_device = None if tokens is None else tokens.tolist()
        chosen = []
        for index, row in enumerate(rows):
            place = row.slot if isinstance(row, ScheduledDecode) else index
            sampler = self._samplers[row.request_id]
            if sampler.on_host and (isinstance(row, ScheduledDecode) or row.is_last):
                assert logits is not None
                state = self.scheduler.state(row.request_id)
                chosen.append(sampler.choose(state.output_token_ids, logits[place]))
            else:
                chosen.append(0 if on_device is None else on_device[place])
        return chosen

    def _note(self, step: Step, events: list[TokenEvent]) -> list[TokenEvent]:
        """Sets the decode rows of the next step, and counts; returns the events with what the host knows of them."""
        statistics, rows, now = self.statistics, self._rows, time.perf_counter()
        statistics.count_step(step, self.config)
        statistics.generated_tokens += len(events)
        step_rows: tuple[ScheduledDecode | ScheduledChunk, ...] = (*step.decodes, *step.chunks)
        slots = {row.request_id: row.slot for row in step_rows}
        for chunk in step.chunks:
            if chunk.is_last:
                rows.active[chunk.slot] = True
                rows.sampling_params[chunk.slot] = self._samplers[chunk.request_id].params
                rows.uniforms[chunk.slot] = 0.0
                statistics.first_token_seconds.add(now - self._arrived[chunk.request_id])
        for index, event in enumerate(events):
            slot, sampler = slots[event.request_id], self._samplers[event.request_id]
            rows.token_ids[slot] = event.token_id
            if sampler.on_host:
                events[index] = event._replace(logprob=sampler.logprob)
            if event.finish_reason is not None:
                rows.active[slot] = False
                statistics.finished += 1
                self._forget(event.request_id)
        return events

    def _forget(self, request_id: str) -> None:
        del self._samplers[request_id], self._arrived[request_id]
