# SPDX-License-Identifier: Apache-2.0
"""Snapshots of state that slots keep of all their tokens together: which tokens each is of, and who goes on behind one.

The state of a recurrence or a convolution, or compressed keys, cannot be cut, so a prompt that starts like earlier tokens goes on where a snapshot is of so
many of them. One is taken where a prompt ends; where the rest of it fits one step, as a prompt that starts alike often parts behind
that; where a prompt parts from what was computed before, if no snapshot is near: who starts alike once more goes on from there; and,
where that is asked for, every so many tokens.
Knows nothing of requests or devices.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from .request import RequestState
from .step import KeptState, ScheduledChunk, Step


class Resumption(NamedTuple):
    """Where a prompt goes on.

    Attributes:
        length: tokens that need not be computed.
        snapshot: what has the state behind them; None where there are none, or no state.
        parts_at: the place in the prompt up to which its tokens were computed before, where a snapshot is worth its cut; 0: nowhere.
    """

    length: int
    snapshot: int | None = None
    parts_at: int = 0


class SnapshotTable:
    """The tokens of each snapshot.

    A place that is needed is an empty one, else that of the least recently used snapshot behind which nobody went on yet, else of the
    others: each prompt leaves some, and they would soon take the place of the one that all prompts begin with. Half of the places
    at most are kept so.

    Args:
        places: how many there are.
        min_reuse: tokens that a snapshot has to be of at least, and beyond which it is worth another.
        largest_step: prompt tokens that one step takes in, at most.
        interval: a snapshot is taken behind the chunk that reaches a multiple of so many tokens; None: of none.
    """

    def __init__(self, places: int, min_reuse: int, largest_step: int, interval: int | None = None) -> None:
        self._tokens: list[np.ndarray | None] = [None] * places
        # Least recently used first; among those that nobody used yet, empty ones before all.
        self._unused = dict.fromkeys(range(places))
        self._used: dict[int, None] = {}
        self._min_reuse = max(1, min_reuse)
        self._largest_step = largest_step
        self._interval = interval

    @property
    def count(self) -> int:
        """Snapshots that prompts can go on behind."""
        return sum(tokens is not None for tokens in self._tokens)

    def tokens(self, place: int) -> np.ndarray | None:
        """What a snapshot is of, int32 `[n]`; None of an empty place."""
        return self._tokens[place]

    def find(self, tokens: np.ndarray) -> int | None:
        """The snapshot of the most of a text's first tokens."""
        best, length = None, 0
        for place, kept in enumerate(self._tokens):
            if kept is None or not length < len(kept) <= len(tokens) or kept[-1] != tokens[len(kept) - 1]:
                continue
            if np.array_equal(kept, tokens[: len(kept)]):
                best, length = place, len(kept)
        return best

    def _length(self, place: int | None) -> int:
        kept = None if place is None else self._tokens[place]
        return 0 if kept is None else len(kept)

    def resume(self, prompt: np.ndarray, common: int, *, has: int) -> Resumption:
        """Where a prompt goes on of which the cache has the first `common` tokens; its last token is always computed.

        Args:
            has: how many it has there, of whatever tokens. Where that is no more, nobody parts from anybody.
        """
        common = min(common, len(prompt) - 1)
        place = self.find(prompt[:common])
        length = self._length(place)
        parts = has > common and common - length >= self._min_reuse
        return Resumption(length, place, common if parts else 0)

    def is_worth(self, start: int, end: int, left: int, parts_at: int) -> bool:
        """Whether a snapshot is to be taken where a prompt's chunk ends.

        Args:
            start, end, left: its tokens before the chunk, up to its end, and behind.
            parts_at: as in `ScheduledChunk`.
        """
        is_due = self._interval is not None and end // self._interval > start // self._interval
        return end >= self._min_reuse and (is_due or left <= self._largest_step or end == parts_at)

    def places(self, texts: Sequence[np.ndarray], needed: Collection[int]) -> list[int | None]:
        """For each text a place for a snapshot of it; None where there is one already, or no place is left.

        Args:
            needed: places that are not to be given away.
        """
        free = iter([place for place in (*self._unused, *self._used) if place not in needed])
        found: list[int | None] = []
        seen: set[bytes] = set()
        for text in texts:
            is_new = text.tobytes() not in seen and self._length(self.find(text)) < len(text)
            seen.add(text.tobytes())
            found.append(next(free, None) if is_new else None)
        return found

    def keep(self, texts: Mapping[str, np.ndarray], used: Collection[int]) -> dict[str, int]:
        """Gives places to snapshots that a step takes, and notes them at once: for who makes steps before the one ahead has run.

        Args:
            texts: by any name, what a snapshot would be of.
            used: places behind which the step's requests go on.

        Returns:
            By name, the place of each that is taken.
        """
        for place in used:
            self.touch(place)
        kept = {}
        for (name, text), free in zip(texts.items(), self.places(list(texts.values()), used), strict=True):
            if free is not None:
                self.set(free, text)
                kept[name] = free
        return kept

    def plan(self, step: Step, find: Callable[[str], RequestState]) -> tuple[KeptState, ...]:
        """What is kept of the slots whose prompts a step advances; no snapshot that the step itself needs gives its place.

        Args:
            find: the request of an id.
        """
        chunks: list[ScheduledChunk] = []
        texts: list[np.ndarray] = []
        for chunk in step.chunks:
            state, end = find(chunk.request_id), chunk.start + chunk.count
            if not state.request.atomic and self.is_worth(chunk.start, end, len(state.tokens) - end, chunk.parts_at):
                chunks.append(chunk)
                texts.append(state.tokens[:end])
        return tuple(
            KeptState(chunk.request_id, chunk.slot, len(text), place, chunk.arrival)
            for chunk, text, place in zip(chunks, texts, self.places(texts, _needed(step)), strict=True)
            if place is not None
        )

    def change(self, step: Step, live: Callable[[KeptState], RequestState | None]) -> None:
        """Follows what a step did.

        Args:
            live: the request of a snapshot; None where it was aborted since: the place then holds what nobody asks for.
        """
        for place in _needed(step):
            self.touch(place)
        for kept in step.kept:
            state = live(kept)
            self.set(kept.place, None if state is None else state.tokens[: kept.length].copy())

    def set(self, place: int, tokens: np.ndarray | None) -> None:
        """Notes what a place has been overwritten with; None: with nothing of use."""
        self._tokens[place] = tokens
        self._leave(place)
        self._unused = {**self._unused, place: None} if tokens is not None else {place: None, **self._unused}

    def touch(self, place: int) -> None:
        """Notes that somebody goes on behind a snapshot."""
        self._leave(place)
        self._used[place] = None
        if len(self._used) > len(self._tokens) // 2:
            oldest = next(iter(self._used))
            del self._used[oldest]
            self._unused[oldest] = None

    def _leave(self, place: int) -> None:
        self._unused.pop(place, None)
        self._used.pop(place, None)

    def clear(self) -> None:
        """Forgets all snapshots."""
        self._tokens = [None] * len(self._tokens)
        self._unused, self._used = dict.fromkeys(range(len(self._tokens))), {}


def _needed(step: Step) -> list[int]:
    """Places of the snapshots behind which a step's requests go on."""
    reused = (chunk.reuse for chunk in step.chunks if chunk.reuse is not None)
    return [reuse.snapshot for reuse in reused if reuse.snapshot is not None]
