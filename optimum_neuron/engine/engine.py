# SPDX-License-Identifier: Apache-2.0
"""The engine: schedules a step, runs it, returns its tokens. Knows no text and no files."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ..core import Request, Step
from ..runtime.lengths import check_token_ids
from ..runtime.runner import GraphRunner
from ..runtime.step_rows import StepRows
from .events import Event, RequestFailedError, RequestFailure, TokenEvent
from .policy import SchedulerOptions
from .sampler import RequestSampler, check_sampling
from .scheduler import Scheduler
from .statistics import GraphUse, Statistics


class Engine:
    """Continuous batching over the rows of one artifact's cache. One thread at a time may use it; see `EngineService`.

    Args:
        runner: the graphs and slots, which nothing else uses while the engine has requests.
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
        snapshots = len(runner.kept.lengths) if runner.kept.needed else None
        self.scheduler = Scheduler(runner.config, used, runner.family, snapshots=snapshots)
        self.statistics = Statistics(graphs={graph.name: GraphUse() for graph in runner.family})
        self._vocab_size = vocab_size
        self._num_embeddings = vocab_size if runner.num_embeddings is None else runner.num_embeddings
        self._seeds = np.random.SeedSequence(seed)
        self._samplers: dict[str, RequestSampler] = {}
        self._arrived: dict[str, float] = {}
        self._started: dict[str, float] = {}  # of requests without a token
        self._rows: StepRows[RequestSampler] = StepRows(runner)
        runner.reset_slots()

    @property
    def has_work(self) -> bool:
        """Return whether any request is not finished."""
        return self.scheduler.has_work

    def check_request(self, request: Request) -> None:
        """Raise ValueError where a request could never be served; change nothing."""
        self._check_tokens(request)
        self.scheduler.check_request(request)

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: the request could never be served, with the reason and the remedy.
        """
        self._check_tokens(request)
        self.scheduler.add_request(request)
        seed = self._seeds.spawn(1)[0] if request.seed is None else np.random.SeedSequence(request.seed)
        self._samplers[request.request_id] = RequestSampler(request, self.config, self._vocab_size, seed)
        self._arrived[request.request_id] = time.perf_counter()

    def _check_tokens(self, request: Request) -> None:
        who, size = f"request {request.request_id!r}", self._vocab_size
        check_token_ids(request.prompt_token_ids, self._num_embeddings, f"the prompt of {who}")
        if not all(0 <= token < size for token in request.eos_token_ids):
            raise ValueError(
                f"{who} has eos_token_ids={sorted(request.eos_token_ids)}, and the model chooses tokens from 0 to {size - 1}; "
                f"leave out the others"
            )
        check_sampling(request, self.config)

    def abort_request(self, request_id: str) -> bool:
        """End a request in any state; return False where no such request is live."""
        if not self.scheduler.abort_request(request_id):
            return False
        self._forget_request(request_id)
        self.statistics.aborted += 1
        return True

    def abort_requests(self) -> None:
        """End all requests."""
        for request_id in list(self._samplers):
            self.abort_request(request_id)

    def step(self) -> list[Event]:
        """Run one step; return the tokens that requests got from it, none where there is nothing to do.

        A request with a token that cannot be chosen, because its processors raise or leave nothing to choose from, ends with a
        `RequestFailure`, and no other is affected. Any other failure ends all requests and voids all slots: how far the
        cache was written is then unknown.
        """
        step = self.scheduler.schedule()
        if step is None:
            return []
        try:
            return self._run_step(step)
        except BaseException:
            self.abort_requests()
            self.scheduler.cache.forget_all()
            raise

    def run_requests(self) -> Iterator[Event]:
        """Step until all requests are finished; yield their tokens, or their failures."""
        while self.has_work:
            yield from self.step()

    def _run_step(self, step: Step) -> list[Event]:
        start = time.perf_counter()
        self._prepare_rows(step, start)
        decodes = [self._samplers[decode.request_id] for decode in step.decodes]
        tokens: list[int] = []
        failures: list[RequestFailure] = []
        chosen = self._rows.run_rows(decodes, step.pieces, step.graph)
        for kept in step.kept:
            self.runner.keep_state(kept.slot, kept.place)
        for sampler, choice in chosen:
            token = choice if isinstance(choice, int) else self._choose_token(sampler, choice)
            if isinstance(token, int) and token >= self._num_embeddings:
                token = self._refuse_token(sampler.request.request_id, token)
            if isinstance(token, int):
                tokens.append(token)
                continue
            if self._end_failed(token.request_id):
                failures.append(token)
            tokens.append(0)
        ended = iter(tokens[len(decodes) :])
        piece_tokens = [next(ended) if piece.is_last else 0 for piece in step.pieces]
        seconds = time.perf_counter() - start
        # Tokens of requests that failed meanwhile, or that a processor aborted, are dropped, and their slots are free.
        events = self.scheduler.commit(step, tokens[: len(decodes)], piece_tokens, seconds)
        return [*self._note_tokens(step, events), *failures]

    def _prepare_rows(self, step: Step, now: float) -> None:
        """Do what a step asks for before its graph runs."""
        runner = self.runner
        for gone in step.preempted:
            runner.reset_slot(gone.slot)
        for piece in step.pieces:
            if piece.is_first:
                sampler = self._samplers[piece.request_id]
                if not sampler.began:  # else it was preempted
                    self.statistics.queue_seconds.add_seconds(now - self._arrived[piece.request_id])
                    self._started[piece.request_id] = sampler.began = now
                sampler.slot = piece.slot
                self._rows.start_request(sampler)
        for assignment in step.assignments:
            runner.assign_blocks(assignment.slot, assignment.first, assignment.blocks)
        for copy in step.copies:
            runner.copy_block(*copy)
        for piece in step.pieces:
            if piece.prefix is not None:
                runner.resume_slot(piece.slot, piece.prefix.length, piece.prefix.state_place)

    def _choose_token(self, sampler: RequestSampler, logits: np.ndarray) -> int | RequestFailure:
        request_id = sampler.request.request_id
        if self._samplers.get(request_id) is not sampler:  # another request's processor aborted it
            return 0
        try:
            return sampler.choose_token(self.scheduler.find_state(request_id).output_token_ids, logits)
        except BaseException as error:
            # In the main thread, one that is no Exception comes from a signal's handler and belongs to no request.
            if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
                raise
            return RequestFailure(request_id, RequestFailedError(request_id, "no token could be chosen", error))

    def _refuse_token(self, request_id: str, token_id: int) -> RequestFailure:
        """Fail a request of a model that has more logits than embeddings, and chose one without an embedding."""
        cause = ValueError(f"the model takes token ids from 0 to {self._num_embeddings - 1}")
        return RequestFailure(
            request_id, RequestFailedError(request_id, f"it cannot continue after token {token_id}", cause)
        )

    def _end_failed(self, request_id: str) -> bool:
        """End a request; return False where it aborted itself before it failed."""
        if not self.scheduler.abort_request(request_id):
            return False
        self._forget_request(request_id)
        self.statistics.failed += 1
        return True

    def _ask_end(self, sampler: RequestSampler, event: TokenEvent, now: float) -> Event:
        """Return the event of a request that may say itself where its text ends."""
        request = sampler.request
        if request.ends is None or event.finish_reason is not None:
            return event
        tokens = self.scheduler.find_state(request.request_id).output_token_ids
        try:
            reason = request.ends(tokens, now - sampler.began)
        except Exception as error:
            self._end_failed(request.request_id)
            failed = RequestFailedError(request.request_id, "whether its text ends could not be found", error)
            return RequestFailure(request.request_id, failed)
        if reason is not None:
            self.scheduler.abort_request(request.request_id)
        return event._replace(finish_reason=reason)

    def _note_tokens(self, step: Step, events: list[TokenEvent]) -> list[Event]:
        """Set the tokens of the next decode rows, and count; return the events with what the host knows of them."""
        statistics, now = self.statistics, time.perf_counter()
        statistics.count_step(step)
        statistics.blocks_in_use = self.scheduler.cache.used_blocks
        statistics.generated_tokens += len(events)
        noted: list[Event] = []
        for event in events:
            sampler = self._samplers[event.request_id]
            self._rows.feed_token(sampler.slot, event.token_id)
            if event.request_id in self._started:  # its first token
                statistics.first_token_seconds.add_seconds(now - self._arrived[event.request_id])
                event = event._replace(started=self._started.pop(event.request_id))
            if sampler.on_host:
                event = event._replace(logprob=sampler.logprob, top=sampler.top)
            elif sampler.logprobs:
                found = self._rows.logprobs[sampler.slot]
                top = tuple(zip(found.tokens.tolist(), found.best.tolist(), strict=True))
                event = event._replace(logprob=float(found.chosen), top=top)
            noted.append(self._ask_end(sampler, event, now))
            if isinstance(noted[-1], TokenEvent) and noted[-1].finish_reason is not None:
                statistics.finished += 1
                self._forget_request(event.request_id)
        return noted

    def _forget_request(self, request_id: str) -> None:
        del self._samplers[request_id], self._arrived[request_id]
        self._started.pop(request_id, None)
