# SPDX-License-Identifier: Apache-2.0
"""Which prompts a step advances, and by how much. Changes nothing; knows nothing of queues or decodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..step.family import rows_needed
from .placement import CacheDraft, Placement
from .request import RequestState
from .step import PassedOver, ScheduledChunk


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


def plan_chunks(candidates: Sequence[RequestState], cache: CacheDraft, limits: ChunkLimits) -> ChunkPlan:
    """Gives out the rows, tokens, free slots and blocks of one step.

    The first candidate is due. Where it does not end in this step, prompts that do may go before it, unless it was
    passed over too often. Then all candidates take in order what is left.

    Args:
        candidates: prompts in the order in which they are due, at least one; the first has a slot or finds a free one.
        cache: what of it the step may use.
    """
    due = candidates[0]
    draft = _Draft(cache, limits, limits.largest_chunk)
    if due.atomic_tokens:
        smallest = next(size for size in limits.chunk_sizes if rows_needed([due.atomic_tokens], size) <= limits.rows)
        draft.chunk_size = max(draft.chunk_size, smallest)
    if due.bypassed < limits.max_bypass and not draft.ends(draft.place(due)):
        _let_pass(due, candidates[1:], draft)
    passed = bool(draft.chunks)
    _fill(candidates, draft)
    chunks = tuple(draft.chunks.values())
    is_passed = passed and due.arrival not in draft.chunks
    return ChunkPlan(chunks, PassedOver(due.request.request_id, due.arrival) if is_passed else None)


def _let_pass(due: RequestState, others: Sequence[RequestState], draft: _Draft) -> None:
    """Takes prompts of the same priority that end in this step, or would but for a cut. One slot is kept for the prompt that is due; as long as it
    has none, no prompt that is cut passes it: having begun, that one would be due in the next step."""
    kept = 1 if due.slot is None else 0
    for state in others:
        if draft.is_full:
            return
        same_priority = state.request.priority == due.request.priority
        has_slot = state.slot is not None or draft.open_slots > kept
        if same_priority and has_slot and draft.may_end(state):
            place = draft.place(state)
            if draft.ends(place) and not (kept and place.is_cut):
                draft.take(place)


def _fill(candidates: Sequence[RequestState], draft: _Draft) -> None:
    """Takes prompts in order.

    An atomic one that does not fit waits, and so do those behind it that would start and not end: being unfinished,
    they would go before it in all later steps, and it might wait for ever. Where one has to wait for blocks, nobody behind it
    starts: they would take the blocks that it waits for.
    """
    atomic_waits = False
    for state in candidates:
        if draft.is_full:
            return
        starts = state.slot is None
        if state.arrival in draft.chunks or (starts and not draft.open_slots):
            continue
        place = draft.place(state)
        if place.at is None:
            draft.cache.close()
        elif draft.fits(place) or not (state.atomic_tokens or (starts and atomic_waits)):
            draft.take(place)
        atomic_waits |= state.atomic_tokens > 0 and state.arrival not in draft.chunks


class _Place(NamedTuple):
    """Where a prompt would go on if it were taken now, and by how much it could; `at` is None where it has to wait.

    Attributes:
        left: tokens to the prompt's end.
        parts_at: as in `ScheduledChunk`.
    """

    state: RequestState
    at: Placement | None
    start: int
    left: int
    room: int
    parts_at: int

    @property
    def is_cut(self) -> bool:
        """Whether there is a cut before the prompt's end."""
        return self.start < self.parts_at < self.start + self.left

    @property
    def most(self) -> int:
        """Tokens to the prompt's end, or to a cut before it."""
        return self.parts_at - self.start if self.is_cut else self.left


class _Draft:
    """A step's chunks so far, by arrival, and what is left to give out."""

    def __init__(self, cache: CacheDraft, limits: ChunkLimits, chunk_size: int) -> None:
        self.cache = cache
        self._limits = limits
        self._rows = limits.rows
        self._tokens = limits.tokens
        self.chunk_size = chunk_size
        self.chunks: dict[int, ScheduledChunk] = {}

    @property
    def is_full(self) -> bool:
        return not self._rows or not self._tokens

    @property
    def open_slots(self) -> int:
        return self.cache.open_slots

    def place(self, state: RequestState) -> _Place:
        at = self.cache.place(state, self._may_reuse(state))
        start = state.computed if state.slot is not None or at is None else at.start
        room = min(self._room(state), self.cache.room(state, at))
        parts_at = max(state.parts_at, 0 if at is None else at.parts_at)
        return _Place(state, at, start, len(state.tokens) - start, room, parts_at)

    def may_end(self, state: RequestState) -> bool:
        """Cheaper than `place`, for the many prompts that are too long whatever they reuse."""
        excess = state.remaining - self._room(state)
        if excess <= 0:
            return True
        return self._may_reuse(state) and self.cache.may_share(state, excess)

    def fits(self, place: _Place) -> bool:
        """Whether as much of the prompt as has to be taken at once, or else the rest of it, fits into what is left."""
        return not place.is_cut and place.room >= (place.state.atomic_tokens or place.left)

    def ends(self, place: _Place) -> bool:
        """Whether the prompt would end in this step, or would but for a cut."""
        return place.room >= place.left and place.state.atomic_tokens in (0, place.left)

    def take(self, place: _Place) -> None:
        state, at = place.state, place.at
        count = min(state.atomic_tokens or place.most, place.room)
        if at is None or not count:
            return
        if count < place.left and not state.atomic_tokens:
            beyond = (place.start + count) % self._limits.alignment
            count -= beyond if beyond < count else 0
        self._rows -= rows_needed([count], self.chunk_size)
        self._tokens -= count
        self.cache.take(state, at, count)
        self.chunks[state.arrival] = ScheduledChunk(
            request_id=state.request.request_id,
            slot=at.slot,
            start=place.start,
            count=count,
            is_first=state.slot is None,
            is_last=count == place.left,
            reuse=at.reuse,
            arrival=state.arrival,
            generated=len(state.output_token_ids),
            preemptions=state.preemptions,
            recomputed=max(0, min(place.start + count, state.lost) - place.start),
            parts_at=place.parts_at,
        )

    def _may_reuse(self, state: RequestState) -> bool:
        # Rows of an atomic prompt depend on tokens behind them, so no prefix of it stands alone.
        return self._limits.prefix_reuse and state.slot is None and not state.request.atomic

    def _room(self, state: RequestState) -> int:
        """Tokens by which the rows and the budget that are left let a prompt advance."""
        room = min(self._rows * self.chunk_size, self._tokens)
        return room if state.atomic_tokens else min(room, self._limits.tokens_per_prompt)
