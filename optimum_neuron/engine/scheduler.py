# SPDX-License-Identifier: Apache-2.0
"""Decides what each step does, and keeps the requests' progress. Knows nothing of tensors, models or devices.

`schedule` proposes a step and changes nothing; `commit` takes the tokens that the step produced. Whoever runs steps
has at most one between the two.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, itemgetter

from ..config import NeuronConfig
from ..step.family import GraphFamily
from ..step.spec import GraphKind, GraphSpec, graph_specs
from .admission import check_request
from .block_table import BlockTable
from .placement import CacheDraft
from .planner import ChunkLimits, plan_chunks
from .policy import SchedulerOptions, StepCosts, next_kind, resolve_policy
from .request import Request, RequestState, RequestStatus
from .slots import MIN_REUSE, SlotTable
from .snapshots import SnapshotTable
from .step import Assignment, KeptState, PassedOver, Preempted, ScheduledChunk, ScheduledDecode, Step, TokenEvent


# Waiting prompts that a step looks at. More would find shorter ones to let pass, at a cost that every step pays.
WAITING_WINDOW = 64


class Scheduler:
    """Continuous batching over the slots, or the blocks, of one artifact.

    Args:
        config: the artifact's sizes.
        options: how steps are filled.
        family: the graphs, which choose that of each step; None: those that `config` describes.
        min_reuse: tokens that a common prefix must have to be reused.
        snapshots: places for snapshots of state that slots keep beside keys and values, without which they reuse nothing; None where
            they keep none.

    Attributes:
        options: as given.
        policy: what `options.policy` stands for.
        slots: who holds which slot, or which row and blocks.

    Raises:
        ValueError: the artifact cannot do what the options ask.
    """

    def __init__(
        self,
        config: NeuronConfig,
        options: SchedulerOptions | None = None,
        family: GraphFamily | None = None,
        *,
        min_reuse: int = MIN_REUSE,
        snapshots: int | None = None,
    ) -> None:
        self.options = options or SchedulerOptions()
        self._config = config
        self._family = family or GraphFamily(graph_specs(config))
        self.policy = resolve_policy(self.options.policy, config.mixed_step)
        self._largest_step = config.step_capacity
        if self.options.max_step_tokens is not None:
            self._largest_step = self.options.max_step_tokens
        if self._largest_step <= config.batch_size:
            raise ValueError(
                f"max_step_tokens={self._largest_step} must exceed batch_size={config.batch_size}, or decoding leaves no "
                f"token for a prompt; raise max_step_tokens to {config.batch_size + 1} or more"
            )
        self._reuses = self.options.prefix_reuse and snapshots != 0
        kept = None
        if snapshots is not None and self._reuses:
            kept = SnapshotTable(snapshots, min_reuse, config.prompt_capacity, config.state_snapshot_interval)
        self.slots: SlotTable | BlockTable = SlotTable(config.batch_size, config.sequence_length, min_reuse, kept)
        if config.kv_block_size is not None:
            self.slots = BlockTable(config, min_reuse, kept)
        # Then who decodes needs nothing but its slot: most steps are of such alone, and are planned at once.
        self._holds_all = config.kv_block_size is None and kept is None
        self._costs = StepCosts()
        self._live: dict[str, RequestState] = {}
        self._waiting: list[RequestState] = []
        self._prefilling: list[RequestState] = []
        self._running: dict[int, RequestState] = {}
        self._decodes: tuple[ScheduledDecode, ...] = ()
        self._running_changed = False
        self._context = 0  # cache columns that the decodes see
        self._after_chunks = False
        self._arrivals = 0

    @property
    def waiting(self) -> int:
        """Requests without a slot."""
        return len(self._waiting)

    @property
    def prefilling(self) -> int:
        """Requests whose prompt is taken in only in part."""
        return len(self._prefilling)

    @property
    def running(self) -> int:
        """Requests that generate."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether any request is not finished."""
        return bool(self._live)

    def state(self, request_id: str) -> RequestState:
        """Progress of a request that is not finished; not to be changed.

        Raises:
            KeyError: the id is unknown, or its request finished.
        """
        return self._live[request_id]

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            ValueError: the request could never be served.
        """
        max_new_tokens = self.check(request)
        state = RequestState(request, self._arrivals, max_new_tokens)
        self._arrivals += 1
        self._live[request.request_id] = state
        insort(self._waiting, state, key=_queue_order)

    def check(self, request: Request) -> int:
        """Raises what `add` would raise and changes nothing; returns how many tokens the request gets at most."""
        if request.request_id in self._live:
            raise ValueError(
                f"request {request.request_id!r} is not finished; choose another id, or abort the first one"
            )
        return check_request(
            request,
            self._config,
            largest_step=self._largest_step,
            decodes_beside=self._config.batch_size - 1 if self.policy == "mixed" else 0,
        )

    def abort(self, request_id: str) -> bool:
        """Ends a request in whatever state it is and frees its slot; returns False where no such request is live.

        A step under way may still hold the request: `commit` drops its tokens.
        """
        state = self._live.get(request_id)
        if state is None:
            return False
        if state.status is RequestStatus.WAITING:
            _remove(self._waiting, state)
        elif state.status is RequestStatus.PREFILLING:
            _remove(self._prefilling, state)
        self._finish(state)
        self._refresh_decodes()
        return True

    def schedule(self) -> Step | None:
        """The next step, or None where no request is live. Changes nothing, so that two calls agree."""
        if self._decodes and self._holds_all and not self._waiting and not self._prefilling:
            return Step(self._family.select("token_generation", self._context), self._decodes, ())
        draft: CacheDraft = self.slots.draft(chain(self._running.values(), self._prefilling))
        decodes, context, prefilling = self._decodes, self._context, self._prefilling
        if draft.preempted:
            gone = {each.arrival for each in draft.preempted}
            decodes = tuple(decode for decode in decodes if decode.arrival not in gone)
            context = max((self._running[decode.slot].context for decode in decodes), default=0)
            prefilling = [state for state in prefilling if state.arrival not in gone]
        step = self._step(draft, prefilling, decodes, context)
        if step is None:
            return None
        step, kept = draft.complete(step, self._running), self.slots.snapshots
        return step if kept is None else step._replace(kept=kept.plan(step, self.state))

    def _step(
        self, draft: CacheDraft, prefilling: Sequence[RequestState], decodes: tuple[ScheduledDecode, ...], context: int
    ) -> Step | None:
        kind = next_kind(
            self.policy,
            decodes=bool(decodes),
            prompts=bool(prefilling or (self._waiting and draft.open_slots)),
            after_chunks=self._after_chunks,
            unfinished=bool(prefilling),
        )
        if kind is None:
            return None
        if kind != "token_generation":
            beside, seen = (decodes, context) if kind == "mixed" else ((), 1)
            plan = plan_chunks(self._candidates(prefilling, draft), draft, self._limits(kind, len(beside)))
            if plan.chunks:
                graph = self._graph(kind, beside, seen, plan.chunks)
                return Step(graph, beside, plan.chunks, plan.passed_over)
        # No prompt advances, be it that all wait for the blocks of those who decode.
        return Step(self._graph("token_generation", decodes, context, ()), decodes, ())

    def _graph(
        self, kind: GraphKind, decodes: Sequence[ScheduledDecode], context: int, chunks: Sequence[ScheduledChunk]
    ) -> GraphSpec:
        """The smallest graph of a step whose decodes see so many columns, each of its own blocks, where these are read in place."""
        counts = [chunk.count for chunk in chunks]
        seen = max([chunk.start + chunk.count for chunk in chunks], default=1)
        if self._family.in_place and isinstance(self.slots, BlockTable):
            blocks = self.slots.reach((decode.slot, self._running[decode.slot].cached) for decode in decodes)
            return self._family.select(kind, seen, counts, blocks)
        return self._family.select(kind, max(context, seen), counts)

    def _candidates(self, prefilling: Sequence[RequestState], draft: CacheDraft) -> Sequence[RequestState]:
        """Prompts that this step could advance, in the order in which they are due."""
        if self.policy == "all_chunks":  # one prompt to its end, whoever comes meanwhile
            return prefilling[:1] or self._waiting[:1]
        waiting = self._waiting[:WAITING_WINDOW] if draft.open_slots else []
        return sorted((*prefilling, *waiting), key=_due_order)

    def _limits(self, kind: GraphKind, decodes: int) -> ChunkLimits:
        options, config = self.options, self._config
        chunk_sizes = self._family.chunk_sizes(kind)
        largest = chunk_sizes[-1]
        if options.itl_target_ms is not None and self._running:
            largest = self._costs.largest_within(options.itl_target_ms / 1000, chunk_sizes, kind)
        return ChunkLimits(
            rows=config.ctx_batch_size,
            chunk_sizes=chunk_sizes,
            largest_chunk=largest,
            tokens=self._largest_step - decodes,
            tokens_per_prompt=options.long_prefill_token_threshold or config.sequence_length,
            alignment=options.chunk_alignment,
            max_bypass=options.max_bypass,
            prefix_reuse=self._reuses,
        )

    def commit(
        self, step: Step, decode_tokens: Sequence[int], chunk_tokens: Sequence[int], seconds: float | None = None
    ) -> list[TokenEvent]:
        """Takes what a step produced and returns the tokens that callers get.

        Args:
            step: what `schedule` returned last.
            decode_tokens: one token per decode of the step, in its order.
            chunk_tokens: one token per chunk, in its order; those of unfinished prompts are ignored.
            seconds: how long the step ran.

        Raises:
            ValueError: a token is missing or too many.
            RuntimeError: the step does not continue the present state: it was committed before, or is outdated.
        """
        self._check_step(step, decode_tokens, chunk_tokens)
        self._costs.record(step.graph, seconds)
        self._after_chunks = bool(step.chunks)
        if step.passed_over and (state := self._current(step.passed_over)):
            state.bypassed += 1
        for gone in step.preempted:
            if state := self._current(gone):
                self._preempt(state, gone.slot)
        self.slots.change(step, self._current)
        events = []
        for decode, token_id in zip(step.decodes, decode_tokens, strict=True):
            if state := self._current(decode):
                if self.options.reuse_generated and not state.request.atomic:
                    self.slots.append(decode.slot, state.output_token_ids[-1])
                events.append(self._emit(state, int(token_id)))
        for chunk, token_id in zip(step.chunks, chunk_tokens, strict=True):
            if state := self._current(chunk):
                self._advance(state, chunk)
                if chunk.is_last:
                    events.append(self._emit(state, int(token_id)))
            else:
                self.slots.overwritten(chunk)
        self._context += bool(step.decodes)
        self._refresh_decodes()
        return events

    def _check_step(self, step: Step, decode_tokens: Sequence[int], chunk_tokens: Sequence[int]) -> None:
        if (len(decode_tokens), len(chunk_tokens)) != (len(step.decodes), len(step.chunks)):
            raise ValueError(
                f"a step of {len(step.decodes)} decodes and {len(step.chunks)} chunks got {len(decode_tokens)} and "
                f"{len(chunk_tokens)} tokens; give one for each"
            )
        items: tuple[ScheduledDecode | ScheduledChunk, ...] = (*step.decodes, *step.chunks)
        for item in items:
            state = self._current(item)
            if state is not None and not _is_due(state, item):
                raise RuntimeError(f"the step does not continue request {item.request_id!r}; commit each step once")

    def _preempt(self, state: RequestState, slot: int) -> None:
        if state.status is RequestStatus.PREFILLING:
            _remove(self._prefilling, state)
        else:
            del self._running[slot]
            self._running_changed = True
        self.slots.release(slot)
        state.preempt()
        insort(self._waiting, state, key=_queue_order)

    def _current(
        self, item: ScheduledChunk | ScheduledDecode | PassedOver | Preempted | Assignment | KeptState
    ) -> RequestState | None:
        """The request that a step means; None where it was aborted since, even if a new one has its id."""
        state = self._live.get(item.request_id)
        return state if state is not None and state.arrival == item.arrival else None

    def _advance(self, state: RequestState, chunk: ScheduledChunk) -> None:
        request = state.request
        start, end = chunk.start, chunk.start + chunk.count
        if chunk.is_first:
            _remove(self._waiting, state)
            insort(self._prefilling, state, key=_queue_order)
            self.slots.hold(chunk.slot, request.request_id, chunk.reuse)
            state.slot, state.parts_at, state.status = chunk.slot, chunk.parts_at, RequestStatus.PREFILLING
            start = 0
        if request.atomic:  # its rows depend on tokens behind them: no other prompt may reuse them
            self.slots.overwritten(chunk)
        else:
            self.slots.write(chunk.slot, start, state.tokens[start:end])
        state.computed, state.bypassed = end, 0
        if chunk.is_last:
            _remove(self._prefilling, state)
            self._running[chunk.slot] = state
            self._running_changed = True
            state.status = RequestStatus.RUNNING

    def _emit(self, state: RequestState, token_id: int) -> TokenEvent:
        reason = state.append(token_id)
        if reason:
            self._finish(state)
        return TokenEvent(state.request.request_id, token_id, reason)

    def _finish(self, state: RequestState) -> None:
        state.status = RequestStatus.FINISHED
        del self._live[state.request.request_id]
        if state.slot is not None:
            self.slots.release(state.slot)
            self._running_changed |= self._running.pop(state.slot, None) is not None

    def _refresh_decodes(self) -> None:
        if self._running_changed:
            self._decodes = tuple(
                ScheduledDecode(state.request.request_id, slot, state.arrival)
                for slot, state in sorted(self._running.items(), key=itemgetter(0))
            )
            self._context = max((state.context for state in self._running.values()), default=0)
            self._running_changed = False


_queue_order = attrgetter("order")


def _due_order(state: RequestState) -> tuple[int, bool, int]:
    return state.request.priority, state.slot is None, state.arrival


def _remove(queue: list[RequestState], state: RequestState) -> None:
    """Takes a request out of a queue that is in order, without a look at all of it."""
    del queue[bisect_left(queue, state.order, key=_queue_order)]


def _is_due(state: RequestState, item: ScheduledChunk | ScheduledDecode) -> bool:
    if isinstance(item, ScheduledDecode):
        return state.status is RequestStatus.RUNNING
    if item.is_first:
        return state.status is RequestStatus.WAITING
    return state.status is RequestStatus.PREFILLING and state.computed == item.start
