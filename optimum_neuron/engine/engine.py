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
        vocab_size: tokens that the model chooses among.
        seed: seeds the requests that bring no seed of their own, in the order of their arrival.

    Raises:
        ValueError: the artifact cannot do what the options ask.

    Attributes:
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
        places = len(runner.kept.lengths) if runner.kept.needed else None
        self.scheduler = Scheduler(runner.config, used, runner.family, state_places=places)
        self.statistics = Statistics(graphs={graph.name: GraphUse() for graph in runner.family})
        self._vocab_size = vocab_size
        self._num_embeddings = vocab_size if runner.num_embeddings is None else runner.num_embeddings
        self._seeds = np.random.SeedSequence(seed)
        self._samplers: dict[str, RequestSampler] = {}
        self._rows: StepRows[RequestSampler] = StepRows(runner)
        runner.reset_slots()

    @property
    def has_work(self) -> bool:
        """Return whether any request is not finished."""
        return self.scheduler.has_work

    def check_request(self, request: Request) -> None:
        """Raise ValueError where a request could never be served; change nothing."""
        who, size = f"request {request.request_id!r}", self._vocab_size
        check_token_ids(request.prompt_token_ids, self._num_embeddings, f"the prompt of {who}")
        if not all(0 <= token < size for token in request.eos_token_ids):
            raise ValueError(
                f"{who} has eos_token_ids={sorted(request.eos_token_ids)}, and the model chooses tokens from 0 to {size - 1}; "
                f"leave out the others"
            )
        check_sampling(request, self.config)
        self.scheduler.check_request(request)

    def add_request(self, request: Request) -> None:
        """Queue a request; ValueError where it could never be served, with the reason and the remedy."""
        self.check_request(request)
        self.scheduler.add_request(request)
        seed = self._seeds.spawn(1)[0] if request.seed is None else np.random.SeedSequence(request.seed)
        self._samplers[request.request_id] = RequestSampler(request, self.config, self._vocab_size, seed)

    def abort_request(self, request_id: str) -> bool:
        """End a request in any state; return False where no such request is live."""
        if not self.scheduler.abort_request(request_id):
            return False
        del self._samplers[request_id]
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
        failures: list[Event] = []
        chosen = self._rows.run_rows(decodes, step.pieces, step.graph)
        for kept in step.kept:
            self.runner.keep_state(kept.slot, kept.place)
        for sampler, choice in chosen:
            try:
                tokens.append(self._choose_token(sampler, choice))
            except RequestFailedError as error:
                tokens.append(0)
                if self._end_failed(sampler):  # else it aborted itself before
                    failures.append(RequestFailure(sampler.request.request_id, error))
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
                    self.statistics.queue_seconds.add_seconds(now - sampler.arrived)
                    sampler.began = now
                sampler.slot = piece.slot
                self._rows.start_request(sampler)
        for assignment in step.assignments:
            runner.assign_blocks(assignment.slot, assignment.first, assignment.blocks)
        for copy in step.copies:
            runner.copy_block(*copy)
        for piece in step.pieces:
            if piece.prefix is not None:
                runner.resume_slot(piece.slot, piece.prefix.length, piece.prefix.state)

    def _choose_token(self, sampler: RequestSampler, choice: int | np.ndarray) -> int:
        """Return a graph's token, or the host's by a row of logits; RequestFailedError where the request cannot continue with one."""
        request_id = sampler.request.request_id
        if isinstance(choice, int):
            token = choice
        elif self._samplers.get(request_id) is not sampler:  # another request's processor aborted it
            return 0
        else:
            try:
                token = sampler.choose_token(self.scheduler.queues.live[request_id].output_token_ids, choice)
            except BaseException as error:
                # In the main thread, one that is no Exception comes from a signal's handler and belongs to no request.
                if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
                    raise
                raise RequestFailedError(request_id, "no token could be chosen", error) from error
        if token >= self._num_embeddings:
            cause = ValueError(f"the model takes token ids from 0 to {self._num_embeddings - 1}")
            raise RequestFailedError(request_id, f"it cannot continue after token {token}", cause)
        return token

    def _end_failed(self, sampler: RequestSampler) -> bool:
        ended = self.abort_request(sampler.request.request_id)
        self.statistics.aborted -= ended
        self.statistics.failed += ended
        return ended

    def _ask_end(self, sampler: RequestSampler, event: TokenEvent, now: float) -> Event:
        """Return the event of a request that may say itself where its text ends."""
        request = sampler.request
        if request.ends is None or event.finish_reason is not None:
            return event
        try:
            tokens = self.scheduler.queues.live[request.request_id].output_token_ids
            reason = request.ends(tokens, now - sampler.began)
        except Exception as error:
            self._end_failed(sampler)
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
            if not sampler.has_token:
                sampler.has_token = True
                statistics.first_token_seconds.add_seconds(now - sampler.arrived)
                event = event._replace(started=sampler.began)
            if sampler.on_host:
                event = event._replace(logprob=sampler.logprob, top=sampler.top)
            elif sampler.logprobs:
                found = self._rows.logprobs[sampler.slot]
                top = tuple(zip(found.tokens.tolist(), found.best.tolist(), strict=True))
                event = event._replace(logprob=float(found.chosen), top=top)
            noted.append(self._ask_end(sampler, event, now))
            if isinstance(noted[-1], TokenEvent) and noted[-1].finish_reason is not None:
                statistics.finished += 1
                del self._samplers[event.request_id]
        return noted
