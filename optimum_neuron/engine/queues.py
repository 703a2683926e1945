# SPDX-License-Identifier: Apache-2.0
"""The requests of a scheduler by their status, each queue in order. Knows nothing of caches."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from operator import attrgetter, itemgetter

from ..core import Assignment, KeptState, PromptPiece, RequestRow
from .request import RequestState, RequestStatus


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
        state.slot, state.cut, state.status = slot, cut, RequestStatus.PREFILLING

    def start_decodes(self, state: RequestState, slot: int) -> None:
        """Let a request generate after its prompt has ended."""
        _remove_state(self.prefilling, state)
        self.running[slot] = state
        self._running_changed = True
        state.status = RequestStatus.RUNNING

    def restart_state(self, state: RequestState) -> None:
        """Take the row from a preempted request, which waits again."""
        if state.status is RequestStatus.PREFILLING:
            _remove_state(self.prefilling, state)
        elif state.slot is not None:
            del self.running[state.slot]
            self._running_changed = True
        state.restart()
        insort(self.waiting, state, key=_queue_order)

    def finish_state(self, state: RequestState) -> None:
        """Forget a request that has ended, or was aborted in whatever status it is."""
        if state.status is RequestStatus.WAITING:
            _remove_state(self.waiting, state)
        elif state.status is RequestStatus.PREFILLING:
            _remove_state(self.prefilling, state)
        elif state.slot is not None:
            del self.running[state.slot]
            self._running_changed = True
        state.status = RequestStatus.FINISHED
        del self.live[state.request.request_id]

    def find_current(self, item: PromptPiece | RequestRow | Assignment | KeptState) -> RequestState | None:
        """Return the request that a step means; None where it was aborted since, even if a new one has its id."""
        state = self.live.get(item.request_id)
        return state if state is not None and state.arrival == item.arrival else None

    def find_decoding(self, decodes: tuple[RequestRow, ...]) -> Sequence[RequestState | None]:
        """Return the request of each decode of a step; None where it was aborted since.

        Raises:
            RuntimeError: one of them has stopped to generate, but is not gone.
        """
        if decodes is self.decodes:
            return self.decoding
        states = [self.find_current(decode) for decode in decodes]
        for state in states:
            if state is not None and state.status is not RequestStatus.RUNNING:
                raise _outdated_step(state)
        return states

    def check_pieces(self, pieces: Iterable[PromptPiece]) -> None:
        """Raise RuntimeError for a piece that does not continue its prompt."""
        for piece in pieces:
            state = self.find_current(piece)
            if state is not None and not _is_due(state, piece):
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


def _is_due(state: RequestState, piece: PromptPiece) -> bool:
    if piece.is_first:
        return state.status is RequestStatus.WAITING
    return state.status is RequestStatus.PREFILLING and state.computed == piece.start


def _outdated_step(state: RequestState) -> RuntimeError:
    return RuntimeError(f"the step does not continue request {state.request.request_id!r}; commit each step once")
