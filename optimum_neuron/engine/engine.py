# SPDX-License-Identifier: Apache-2.0
"""The engine: schedule a step, run it, hand out its tokens. Knows no text and no files."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from torch import Tensor

from ..runtime.runner import GraphRunner
from ..runtime.step_rows import Prefix, PromptPart, StepRows
from ..runtime.token_ids import check_token_ids
from .policy import SchedulerOptions
from .request import Request
from .sampler import RequestSampler, check_sampling
from .scheduler import Scheduler
from .statistics import GraphUse, Statistics
from .step import Event, RequestFailedError, RequestFailure, ScheduledChunk, Step, TokenEvent


class Engine:
    """Continuous batching over the slots, or the blocks, of one artifact. To be used by one thread at a time; see `EngineService`.

    Args:
        runner: the graphs and slots, which nobody else uses while the engine has requests.
        options: how steps are filled.
        vocab_size: tokens that the model chooses among.
        seed: seeds the requests that bring no seed of their own, in the order of their arrival.

    Raises:
        ValueError: the artifact cannot do what the options ask.

    Attributes:
        options: as they were given.
        scheduler: the requests' progress.
        statistics: what was counted so far.
    """

    def __init__(
        self, runner: GraphRunner, options: SchedulerOptions | None = None, *, vocab_size: int, seed: int | None = None
    ) -> None:
        self.runner = runner
        self.config = runner.config
        self.options = options or SchedulerOptions()
        # A decode row computes other last bits than a chunk row: only prompts are reused where bits matter.
        used = replace(self.options, reuse_generated=False) if runner.deterministic else self.options
        snapshots = runner.kept.places if runner.kept.needed else None
        self.scheduler = Scheduler(runner.config, used, runner.family, snapshots=snapshots)
        self.statistics = Statistics(graphs={graph.name: GraphUse() for graph in runner.family})
        self._vocab_size = vocab_size
        self._num_embeddings = vocab_size if runner.num_embeddings is None else runner.num_embeddings
        self._seeds = np.random.SeedSequence(seed)
        self._samplers: dict[str, RequestSampler] = {}
        self._arrived: dict[str, float] = {}
        self._started: dict[str, float] = {}  # of requests without a token
        self._rows: StepRows[RequestSampler] = StepRows(runner)
        runner.reset_all()

    @property
    def has_work(self) -> bool:
        """Whether any request is not finished."""
        return self.scheduler.has_work

    def check(self, request: Request) -> None:
        """Raises ValueError where a request could never be served; changes nothing."""
        self._check(request)
        self.scheduler.check(request)

    def add_request(self, request: Request) -> None:
        """Queues a request.

        Raises:
            ValueError: the request could never be served; the reason and the remedy are named.
        """
        self._check(request)
        self.scheduler.add(request)
        seed = self._seeds.spawn(1)[0] if request.seed is None else np.random.SeedSequence(request.seed)
        self._samplers[request.request_id] = RequestSampler(request, self.config, self._vocab_size, seed)
        self._arrived[request.request_id] = time.perf_counter()

    def _check(self, request: Request) -> None:
        who, size = f"request {request.request_id!r}", self._vocab_size
        check_token_ids(request.prompt_token_ids, self._num_embeddings, f"the prompt of {who}")
        if not all(0 <= token < size for token in request.eos_token_ids):
            raise ValueError(
                f"{who} has eos_token_ids={sorted(request.eos_token_ids)}, and the model chooses tokens from 0 to {size - 1}; "
                f"leave out the others"
            )
        check_sampling(request, self.config)

    def abort(self, request_id: str) -> bool:
        """Ends a request in any state; False where no such request is live."""
        if not self.scheduler.abort(request_id):
            return False
        self._forget(request_id)
        self.statistics.aborted += 1
        return True

    def abort_all(self) -> None:
        """Ends all requests."""
        for request_id in list(self._samplers):
            self.abort(request_id)

    def step(self) -> list[Event]:
        """Runs one step; returns the tokens that requests got from it, none where there is nothing to do.

        A request whose token cannot be chosen, because its processors raise or leave nothing to choose from, ends with a
        `RequestFailure`, and no other is affected. Whatever else fails ends all requests and voids all slots: how far the
        cache was written is then unknown.
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

    def _run(self, step: Step) -> list[Event]:
        start = time.perf_counter()
        parts = self._begin(step, start)
        decodes = [self._samplers[decode.request_id] for decode in step.decodes]
        tokens: list[int] = []
        failures: list[RequestFailure] = []
        chosen = self._rows.run(decodes, parts, step.graph)
        for kept in step.kept:
            self.runner.keep_state(kept.slot, kept.place)
        for sampler, choice in chosen:
            token = choice if isinstance(choice, int) else self._choose(sampler, choice)
            if isinstance(token, int) and token >= self._num_embeddings:
                token = self._unreadable(sampler.request.request_id, token)
            if isinstance(token, int):
                tokens.append(token)
                continue
            if self._fail(token.request_id):
                failures.append(token)
            tokens.append(0)
        ended = iter(tokens[len(decodes) :])
        chunk_tokens = [next(ended) if part.ends else 0 for part in parts]
        seconds = time.perf_counter() - start
        # Tokens of requests that failed meanwhile, or that a processor aborted, are dropped, and their slots are free.
        events = self.scheduler.commit(step, tokens[: len(decodes)], chunk_tokens, seconds)
        return [*self._note(step, events), *failures]

    def run(self) -> Iterator[Event]:
        """Steps until all requests are finished, and yields their tokens, or their failures."""
        while self.has_work:
            yield from self.step()

    def _begin(self, step: Step, now: float) -> list[PromptPart[RequestSampler]]:
        runner = self.runner
        for gone in step.preempted:
            runner.reset(gone.slot)
        parts = [self._part(chunk, now) for chunk in step.chunks]
        for assignment in step.assignments:
            runner.assign(assignment.slot, assignment.first, assignment.blocks)
        for copy in step.copies:
            runner.copy_block(*copy)
        for chunk in step.chunks:
            if chunk.reuse and chunk.reuse.source_slot is None:
                runner.resume(chunk.slot, chunk.reuse.length, chunk.reuse.snapshot)
        return parts

    def _part(self, chunk: ScheduledChunk, now: float) -> PromptPart[RequestSampler]:
        sampler = self._samplers[chunk.request_id]
        if chunk.is_first:
            if not chunk.preemptions:
                self.statistics.queue_seconds.add(now - self._arrived[chunk.request_id])
                self._started[chunk.request_id] = sampler.began = now
            sampler.slot = chunk.slot
            known, reuse = None, chunk.reuse
            if reuse is not None and reuse.source_slot is not None:
                known = Prefix(reuse.source_slot, reuse.length, reuse.snapshot)
            self._rows.start(sampler, known)
        tokens = self.scheduler.state(chunk.request_id).tokens[chunk.start : chunk.start + chunk.count]
        return PromptPart(sampler, tokens, chunk.is_last)

    def _choose(self, sampler: RequestSampler, logits: Tensor) -> int | RequestFailure:
        request_id = sampler.request.request_id
        if self._samplers.get(request_id) is not sampler:  # another request's processor aborted it
            return 0
        try:
            return sampler.choose(self.scheduler.state(request_id).output_token_ids, logits)
        except BaseException as error:
            # In the main thread, one that is no Exception comes from a signal's handler and is nobody's in particular.
            if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
                raise
            return RequestFailure(request_id, RequestFailedError(request_id, "no token could be chosen", error))

    def _unreadable(self, request_id: str, token_id: int) -> RequestFailure:
        """Of a model that has more logits than embeddings."""
        cause = ValueError(f"the model takes token ids from 0 to {self._num_embeddings - 1}")
        return RequestFailure(
            request_id, RequestFailedError(request_id, f"it cannot continue after token {token_id}", cause)
        )

    def _fail(self, request_id: str) -> bool:
        """Ends a request; False where it aborted itself before it failed."""
        if not self.scheduler.abort(request_id):
            return False
        self._forget(request_id)
        self.statistics.failed += 1
        return True

    def _ended(self, sampler: RequestSampler, event: TokenEvent, now: float) -> Event:
        """The event of a request that may say itself where its text ends."""
        request = sampler.request
        if request.ends is None or event.finish_reason is not None:
            return event
        tokens = self.scheduler.state(request.request_id).output_token_ids
        try:
            reason = request.ends(tokens, now - sampler.began)
        except Exception as error:
            self._fail(request.request_id)
            failed = RequestFailedError(request.request_id, "whether its text ends could not be found", error)
            return RequestFailure(request.request_id, failed)
        if reason is not None:
            self.scheduler.abort(request.request_id)
        return event._replace(finish_reason=reason)

    def _note(self, step: Step, events: list[TokenEvent]) -> list[Event]:
        """Sets the tokens of the next decode rows, and counts; returns the events with what the host knows of them."""
        statistics, now = self.statistics, time.perf_counter()
        statistics.count_step(step)
        statistics.blocks_in_use = self.scheduler.slots.used
        statistics.generated_tokens += len(events)
        for chunk in step.chunks:
            if chunk.is_last and not chunk.generated and chunk.request_id in self._arrived:
                statistics.first_token_seconds.add(now - self._arrived[chunk.request_id])
        noted: list[Event] = []
        for event in events:
            sampler = self._samplers[event.request_id]
            self._rows.feed(sampler.slot, event.token_id)
            if event.request_id in self._started:
                event = event._replace(started=self._started.pop(event.request_id))
            if sampler.on_host:
                event = event._replace(logprob=sampler.logprob, top=sampler.top)
            elif sampler.logprobs:
                told = self._rows.told[sampler.slot]
                top = tuple(zip(told.tokens.tolist(), told.best.tolist(), strict=True))
                event = event._replace(logprob=float(told.chosen), top=top)
            noted.append(self._ended(sampler, event, now))
            if isinstance(noted[-1], TokenEvent) and noted[-1].finish_reason is not None:
                statistics.finished += 1
                self._forget(event.request_id)
        return noted

    def _forget(self, request_id: str) -> None:
        del self._samplers[request_id], self._arrived[request_id]
        self._started.pop(request_id, None)
