# SPDX-License-Identifier: Apache-2.0
"""The prompts that a step advances, and by how much. Changes nothing; knows nothing of queues or decodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..core import PromptPiece, RequestRow
from ..step.family import rows_needed
from .block_table import NO_PREFIX, BlockDraft
from .policy import SchedulerOptions
from .queues import RequestState


@dataclass(frozen=True, kw_only=True)
class PromptLimits:
    """Sizes that the prompts of one step share.

    Attributes:
        rows: chunk rows of the graph; a row never holds two prompts, a prompt may take several.
        chunk_sizes: compiled tokens per row, ascending.
        largest_chunk: tokens per row that this step may have, one of `chunk_sizes`; only an atomic prompt exceeds it.
        tokens: prompt tokens of the step.
        tokens_per_prompt: tokens by which one prompt may advance; an atomic one may exceed it.
    """

    options: SchedulerOptions
    rows: int
    chunk_sizes: tuple[int, ...]
    largest_chunk: int
    tokens: int
    tokens_per_prompt: int


def plan_prompts(
    candidates: Sequence[RequestState], cache: BlockDraft, limits: PromptLimits
) -> tuple[tuple[PromptPiece, ...], RequestRow | None]:
    """Give out the rows, tokens and blocks of one step. Return its pieces, and the prompt that was due if it got nothing.

    The first candidate is due, and has a row or finds a free one. Where it does not end in this step, prompts that do may go before
    it, unless it was passed over too often. Then all candidates take in order what is left.
    """
    due = candidates[0]
    draft = _PromptDraft(cache, limits, due)
    if due.bypassed < limits.options.max_bypass:
        piece = draft.place_prompt(due)
        if piece is None or not draft.may_finish(due, piece):
            _let_others_pass(due, candidates[1:], draft)
    has_passed = bool(draft.pieces)
    _fill_in_order(candidates, draft)
    passed_over = None
    if has_passed and due.arrival not in draft.pieces:
        passed_over = RequestRow(due.request.request_id, -1 if due.slot is None else due.slot, due.arrival)
    return tuple(draft.pieces.values()), passed_over


def _let_others_pass(due: RequestState, others: Sequence[RequestState], draft: _PromptDraft) -> None:
    """Take prompts of the same priority that end in this step, or would but for a cut.

    One row is kept for the prompt that is due. As long as it has none, no prompt that is cut passes it: having begun, that one
    would be due in the next step.
    """
    kept = 1 if due.slot is None else 0
    for state in others:
        if draft.is_full:
            return
        same_priority = state.request.priority == due.request.priority
        has_row = state.slot is not None or draft.cache.open_rows > kept
        if same_priority and has_row and draft.may_be_short(state):
            piece = draft.place_prompt(state)
            if piece is not None and draft.may_finish(state, piece) and not (kept and _is_cut(piece)):
                draft.take_piece(state, piece)


def _fill_in_order(candidates: Sequence[RequestState], draft: _PromptDraft) -> None:
    """Take prompts in order.

    An atomic one that does not fit waits, and so do later ones that would start and not end: being unfinished, they would go
    before it in all later steps, and it might wait for ever. Where one has to wait for blocks, no later one starts: it would
    take the blocks that the first waits for.
    """
    atomic_waits = False
    for state in candidates:
        if draft.is_full:
            return
        starts = state.slot is None
        if state.arrival in draft.pieces or (starts and not draft.cache.open_rows):
            continue
        piece = draft.place_prompt(state)
        if piece is None:
            draft.cache.is_closed = True
        elif draft.fits(state, piece) or not (state.atomic_tokens or (starts and atomic_waits)):
            draft.take_piece(state, piece)
        atomic_waits |= state.atomic_tokens > 0 and state.arrival not in draft.pieces


def _is_cut(piece: PromptPiece) -> bool:
    """Return whether there is a cut before the piece's end."""
    return piece.start < piece.cut < piece.end


class _PromptDraft:
    """A step's pieces so far, by arrival, and what is left to give out."""

    def __init__(self, cache: BlockDraft, limits: PromptLimits, due: RequestState) -> None:
        self.cache = cache
        self.pieces: dict[int, PromptPiece] = {}
        self._limits = limits
        self._rows = limits.rows
        self._tokens = limits.tokens
        self._chunk_size = limits.largest_chunk
        if whole := due.atomic_tokens:
            fitting = next(size for size in limits.chunk_sizes if rows_needed([whole], size) <= limits.rows)
            self._chunk_size = max(self._chunk_size, fitting)

    @property
    def is_full(self) -> bool:
        return not self._rows or not self._tokens

    def place_prompt(self, state: RequestState) -> PromptPiece | None:
        """Return all that is left of a prompt as one piece; None where it has to wait for blocks."""
        slot, prefix = state.slot, NO_PREFIX
        if slot is None:
            placed = self.cache.place_prompt(state.tokens, self._may_reuse(state), state)
            if placed is None:
                return None
            slot, prefix = placed
        start = state.computed if state.slot is not None else prefix.length
        return PromptPiece(
            slot=slot,
            token_ids=state.tokens[start:],
            request_id=state.request.request_id,
            arrival=state.arrival,
            start=start,
            is_first=state.slot is None,
            prefix=prefix if prefix.length else None,
            cut=max(state.cut, prefix.cut),
        )

    def may_be_short(self, state: RequestState) -> bool:
        """Return False for prompts that are too long for the step whatever they reuse; cheaper than `place_prompt`."""
        excess = state.remaining - self._count_room(state)
        if excess <= 0:
            return True
        return self._may_reuse(state) and self.cache.find_prefix(state.tokens).length >= excess

    def fits(self, state: RequestState, piece: PromptPiece) -> bool:
        """Return whether what has to be taken at once, or else the rest of the prompt, fits into what is left."""
        return not _is_cut(piece) and self._count_left(state, piece) >= (state.atomic_tokens or piece.count)

    def may_finish(self, state: RequestState, piece: PromptPiece) -> bool:
        """Return whether the prompt would end in this step, or would but for a cut."""
        return self._count_left(state, piece) >= piece.count and state.atomic_tokens in (0, piece.count)

    def take_piece(self, state: RequestState, piece: PromptPiece) -> None:
        """Give a prompt as much of what is left as it can use."""
        most = piece.cut - piece.start if _is_cut(piece) else piece.count
        count = min(state.atomic_tokens or most, self._count_left(state, piece))
        if not count:
            return
        if count < piece.count and not state.atomic_tokens:
            beyond = (piece.start + count) % self._limits.options.chunk_alignment
            count -= beyond if beyond < count else 0
        self._rows -= rows_needed([count], self._chunk_size)
        self._tokens -= count
        self.cache.take_tokens(state, piece.slot, piece.prefix or NO_PREFIX, count)
        self.pieces[state.arrival] = replace(
            piece,
            token_ids=piece.token_ids[:count],
            is_last=count == piece.count,
            recomputed=max(0, min(piece.start + count, state.lost) - piece.start),
        )

    def _may_reuse(self, state: RequestState) -> bool:
        # Rows of an atomic prompt depend on later tokens, so no prefix of it stands alone.
        return self._limits.options.prefix_reuse and state.slot is None and not state.request.atomic

    def _count_left(self, state: RequestState, piece: PromptPiece) -> int:
        """Return by how many tokens the rows, the budget and the blocks that are left let a prompt advance."""
        return min(self._count_room(state), self.cache.count_room(state, piece.prefix or NO_PREFIX))

    def _count_room(self, state: RequestState) -> int:
        """Return by how many tokens the rows and the budget that are left let a prompt advance."""
        room = min(self._rows * self._chunk_size, self._tokens)
        return room if state.atomic_tokens else min(room, self._limits.tokens_per_prompt)
