# SPDX-License-Identifier: Apache-2.0
"""The progress of requests, and those of a scheduler in their queues. Knows nothing of caches; imports no torch."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter

import numpy as np

from ..core import Assignment, FinishReason, KeptState, PromptPiece, Request, RequestRow


@dataclass(slots=True, eq=False)
class RequestState:
    """The progress of one request. Only the scheduler changes it.

    Attributes:
        arrival: number of the request in the order of arrival; distinguishes it from a later one with the same id.
        max_new_tokens: the request's own, or what its row holds.
        slot: row of the cache, from the first piece on; None while it waits.
        tokens: int32 `[n]`, what it takes in before it generates: its prompt, and what it had generated when it was preempted.
        computed: how many of these are in the cache, reused ones included.
        cut: where its pieces have a cut, as in `PromptPiece`.
        bypassed: steps in a row in which later prompts went before this one.
        lost: the most tokens that it had in the cache when it was preempted.
    """

    request: Request
    arrival: int
    max_new_tokens: int
    slot: int | None = None
    computed: int = 0
    cut: int = 0
    bypassed: int = 0
    lost: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    tokens: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = self.request.prompt_token_ids

    @property
    def order(self) -> tuple[int, int]:
        """Priority, then arrival: the lower one goes first."""
        return self.request.priority, self.arrival

    @property
    def remaining(self) -> int:
        """Number of `tokens` that are not in the cache yet; 0 while it generates."""
        return len(self.tokens) - self.computed

    @property
    def atomic_tokens(self) -> int:
        """Tokens that the next piece has to take in all at once; 0 where it may end anywhere."""
        return len(self.request.prompt_token_ids) if self.request.atomic and not self.computed else 0

    @property
    def cached(self) -> int:
        """Tokens in the cache, which is the place of the next one."""
        return self.computed if self.remaining else self.context - 1

    @property
    def context(self) -> int:
        """Cache columns that the next token to be fed back sees, its own included."""
        return len(self.request.prompt_token_ids) + len(self.output_token_ids)

    def restart(self) -> None:
        """Make a preempted request wait again, to be computed from its tokens."""
        self.lost = max(self.lost, self.cached)
        self.tokens = np.concatenate([self.request.prompt_token_ids, np.asarray(self.output_token_ids, np.int32)])
        self.slot, self.computed, self.cut = None, 0, 0

    def append_token(self, token_id: int) -> FinishReason | None:
        """Add a generated token; return why the request ends with it, or None where it continues."""
        if self.computed < len(self.tokens):
            raise RuntimeError(
                f"request {self.request.request_id!r} has {self.remaining} prompt tokens left and cannot take a token yet"
            )
        self.output_token_ids.append(token_id)
        if token_id in self.request.eos_token_ids:
            return "stop"
        return "length" if len(self.output_token_ids) >= self.max_new_tokens else None


class RequestQueues:
    """All requests that are not finished.

    Attributes:
        live: by id.
        waiting: without a row, by priority and arrival.
        prefilling: with a prompt that is only partly taken in, by priority and arrival.
        running: that generate, by row.
        decodes: the rows of those, ascending, as a step has them; the same object until one begins or ends.
        decoding: the requests of these rows.
        context: most cache columns that a decode sees.
    """

    def __init__(self) -> None:
        self.live: dict[str, RequestState] = {}
        self.waiting: list[RequestState] = []
        self.prefilling: list[RequestState] = []
        self.running: dict[int, RequestState] = {}
        self.decodes: tuple[RequestRow, ...] = ()
        self.decoding: list[RequestState] = []
        self.context = 0
        self._running_changed = False

    def add_state(self, state: RequestState) -> None:
        """Queue a new request."""
        self.live[state.request.request_id] = state
        insort(self.waiting, state, key=_queue_order)

    def start_prompt(self, state: RequestState, slot: int, cut: int) -> None:
        """Give a waiting request its row."""
        _remove_state(self.waiting, state)
        insort(self.prefilling, state, key=_queue_order)
        state.slot, state.cut = slot, cut

    def start_decodes(self, state: RequestState, slot: int) -> None:
        """Let a request generate after its prompt has ended."""
        _remove_state(self.prefilling, state)
        self.running[slot] = state
        self._running_changed = True

    def restart_state(self, state: RequestState) -> None:
        """Take the row from a preempted request, which waits again."""
        self._leave_queue(state)
        state.restart()
        insort(self.waiting, state, key=_queue_order)

    def finish_state(self, state: RequestState) -> None:
        """Forget a request that has ended, or was aborted in whatever queue it is."""
        self._leave_queue(state)
        del self.live[state.request.request_id]

    def _leave_queue(self, state: RequestState) -> None:
        if state.slot is None:
            _remove_state(self.waiting, state)
        elif state.remaining:
            _remove_state(self.prefilling, state)
        else:
            del self.running[state.slot]
            self._running_changed = True

    def find_current(self, item: PromptPiece | RequestRow | Assignment | KeptState) -> RequestState | None:
        """Return the request that a step means; None where it was aborted since, even if a new one has its id."""
        state = self.live.get(item.request_id)
        return state if state is not None and state.arrival == item.arrival else None

    def find_decoding(self, decodes: tuple[RequestRow, ...]) -> Sequence[RequestState | None]:
        """Return the request of each decode of a step, None where it was aborted; RuntimeError where it stopped to generate."""
        if decodes is self.decodes:
            return self.decoding
        states = [self.find_current(decode) for decode in decodes]
        for state in states:
            if state is not None and (state.slot is None or state.remaining):
                raise _outdated_step(state)
        return states

    def check_pieces(self, pieces: Iterable[PromptPiece]) -> None:
        """Raise RuntimeError for a piece that does not continue its prompt."""
        for piece in pieces:
            state = self.find_current(piece)
            if state is None:
                continue
            starts = state.slot is None
            if starts != piece.is_first or not (starts or state.computed == piece.start):
                raise _outdated_step(state)

    def refresh_decodes(self) -> None:
        """Make `decodes` and `context` follow the requests that generate."""
        if self._running_changed:
            in_order = sorted(self.running.items(), key=itemgetter(0))
            self.decoding = [state for _, state in in_order]
            self.decodes = tuple(RequestRow(state.request.request_id, slot, state.arrival) for slot, state in in_order)
            self.context = max((state.context for state in self.running.values()), default=0)
            self._running_changed = False


_queue_order = attrgetter("order")


def _remove_state(queue: list[RequestState], state: RequestState) -> None:
    """Take a request out of a queue that is in order, without a look at all of it."""
    del queue[bisect_left(queue, state.order, key=_queue_order)]


def _outdated_step(state: RequestState) -> RuntimeError:
    return RuntimeError(f"the step does not continue request {state.request.request_id!r}; commit each step once")
