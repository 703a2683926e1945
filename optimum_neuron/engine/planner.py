# SPDX-License-Identifier: Apache-2.0
"""Which prompts a step advances, and by how much. Changes nothing; knows nothing of queues or decodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..graphs.family import rows_needed
from .request import RequestState
from .slots import SlotTable
from .step import PassedOver, PrefixReuse, ScheduledChunk


@dataclass(frozen=True, kw_only=True)
class ChunkLimits:
    """What the prompts of one step share.

    Attributes:
        rows: chunk rows of the graph; a row never holds two prompts, a prompt may take several.
        chunk_sizes: compiled tokens per row, ascending.
        largest_chunk: tokens per row that this step may have, one of `chunk_sizes`; only an atomic prompt exceeds it.
        tokens: prompt tokens of the step.
        tokens_per_prompt: tokens by which one prompt may advance; an atomic one may exceed it.
        alignment: where a chunk that is not a prompt's last ends.
        max_bypass: how often in a row shorter prompts may go before the first.
        prefix_reuse: whether prompts may reuse cache rows.
    """

    rows: int
    chunk_sizes: tuple[int, ...]
    largest_chunk: int
    tokens: int
    tokens_per_prompt: int
    alignment: int
    max_bypass: int
    prefix_reuse: bool


class ChunkPlan(NamedTuple):
    """Chunks of a step, and the prompt due if it got nothing."""

    chunks: tuple[ScheduledChunk, ...]
    passed_over: PassedOver | None


def plan_chunks(candidates: Sequence[RequestState], slots: SlotTable, limits: ChunkLimits) -> ChunkPlan:
    """Gives out the rows, tokens and free slots of one step.

    The first candidate is due. Where it does not end in this step, prompts that do may go before it, unless it was
    passed over too often. Then all candidates take in order what is left.

    Args:
        candidates: prompts in the order in which they are due, at least one; the first has a slot or finds a free one.
    """
    due = candidates[0]
    draft = _Draft(slots, limits, limits.largest_chunk)
    if due.request.atomic:
        draft.chunk_size = max(draft.chunk_size, _smallest_chunk(due.remaining, limits))
    if due.bypassed < limits.max_bypass and not draft.ends(draft.place(due)):
        _let_pass(due, candidates[1:], draft)
    _fill(candidates, draft)
    chunks = tuple(draft.chunks.values())
    passed_over = None if due.arrival in draft.chunks else PassedOver(due.request.request_id, due.arrival)
    return ChunkPlan(chunks, passed_over)


def _smallest_chunk(count: int, limits: ChunkLimits) -> int:
    return next(size for size in limits.chunk_sizes if rows_needed([count], size) <= limits.rows)


def _let_pass(due: RequestState, others: Sequence[RequestState], draft: _Draft) -> None:
    """Takes prompts of the same priority that end in this step. One slot is kept for the prompt that is due."""
    kept = 1 if due.slot is None else 0
    for state in others:
        if draft.is_full:
            return
        same_priority = state.request.priority == due.request.priority
        has_slot = state.slot is not None or draft.open_slots > kept
        if same_priority and has_slot and draft.may_end(state):
            place = draft.place(state)
            if draft.ends(place):
                draft.take(place)


def _fill(candidates: Sequence[RequestState], draft: _Draft) -> None:
    """Takes prompts in order.

    An atomic one that does not fit waits, and so do those behind it that would start and not end: being unfinished,
    they would go before it in all later steps, and it might wait for ever.
    """
    atomic_waits = False
    for state in candidates:
        if draft.is_full:
            return
        starts = state.slot is None
        if state.arrival in draft.chunks or (starts and not draft.open_slots):
            continue
        place = draft.place(state)
        if draft.ends(place) or not (state.request.atomic or (starts and atomic_waits)):
            draft.take(place)
        atomic_waits |= state.request.atomic and state.arrival not in draft.chunks


class _Place(NamedTuple):
    """Where a prompt would go on if it were taken now."""

    state: RequestState
    slot: int
    start: int
    left: int
    reuse: PrefixReuse | None


class _Draft:
    """A step's chunks so far, by arrival, and what is left to give out."""

    def __init__(self, slots: SlotTable, limits: ChunkLimits, chunk_size: int) -> None:
        self._slots = slots
        self._limits = limits
        self._rows = limits.rows
        self._tokens = limits.tokens
        self._taken: set[int] = set()
        self.chunk_size = chunk_size
        self.chunks: dict[int, ScheduledChunk] = {}

    @property
    def is_full(self) -> bool:
        return not self._rows or not self._tokens

    @property
    def open_slots(self) -> int:
        return self._slots.free_count - len(self._taken)

    def place(self, state: RequestState) -> _Place:
        if state.slot is not None:
            return _Place(state, state.slot, state.computed, state.remaining, None)
        prompt = state.request.prompt_token_ids
        slot, reuse = self._slots.assign(prompt, self._taken, self._may_reuse(state))
        start = reuse.length if reuse else 0
        return _Place(state, slot, start, state.remaining - start, reuse)

    def may_end(self, state: RequestState) -> bool:
        """Cheaper than `place`, for the many prompts that are too long whatever they reuse."""
        excess = state.remaining - self._room(state)
        if excess <= 0:
            return True
        return self._may_reuse(state) and self._slots.may_share(state.request.prompt_token_ids, excess)

    def ends(self, place: _Place) -> bool:
        """Whether the rest of the prompt fits into what is left."""
        return self._room(place.state) >= place.left

    def take(self, place: _Place) -> None:
        count = min(place.left, self._room(place.state))
        if count < place.left:
            beyond = (place.start + count) % self._limits.alignment
            count -= beyond if beyond < count else 0
        self._rows -= rows_needed([count], self.chunk_size)
        self._tokens -= count
        if place.state.slot is None:
            self._taken.add(place.slot)
        self.chunks[place.state.arrival] = ScheduledChunk(
            request_id=place.state.request.request_id,
            slot=place.slot,
            start=place.start,
            count=count,
            is_first=place.state.slot is None,
            is_last=count == place.left,
            reuse=place.reuse,
            arrival=place.state.arrival,
        )

    def _may_reuse(self, state: RequestState) -> bool:
        # Rows of an atomic prompt depend on tokens behind them, so no prefix of it stands alone.
        return self._limits.prefix_reuse and state.slot is None and not state.request.atomic

    def _room(self, state: RequestState) -> int:
        room = min(self._rows * self.chunk_size, self._tokens)
        return room if state.request.atomic else min(room, self._limits.tokens_per_prompt)
