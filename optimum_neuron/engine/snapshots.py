# SPDX-License-Identifier: Apache-2.0
"""Snapshots of state that rows keep of all their tokens together: which tokens each has taken in, and who continues after it.

The state of a recurrence or a convolution, or compressed keys, cannot be cut: a prompt that starts like earlier tokens continues
where a snapshot of so many of them is. One is taken where a prompt ends; where the rest of it fits one step, as a prompt that
starts alike often parts after that; where a prompt parts from what was computed before, if no snapshot is near: the next one that
starts alike continues there; and, where asked for, every so many tokens. Knows nothing of requests or devices.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from ..core import KeptState, Prefix, PromptPiece, Step
from .request import RequestState


class SnapshotTable:
    """The tokens of each snapshot.

    A new snapshot takes an empty place, else that of the least recently used snapshot that no prompt continued after yet, else of
    the others: each prompt leaves some, and they would soon take the place of the one that all prompts begin with. At most half
    of the places are kept so.

    Args:
        places: how many there are.
        min_reuse: least tokens of a snapshot, and beyond one that are worth another.
        largest_step: most prompt tokens that one step takes in.
        interval: a snapshot is taken after the piece that reaches a multiple of so many tokens; None: after none.
    """

    def __init__(self, places: int, min_reuse: int, largest_step: int, interval: int | None = None) -> None:
        self._tokens: list[np.ndarray | None] = [None] * places
        # Least recently used first; among those that are not used yet, empty ones before all.
        self._unused = dict.fromkeys(range(places))
        self._used: dict[int, None] = {}
        self._min_reuse = max(1, min_reuse)
        self._largest_step = largest_step
        self._interval = interval

    def read_tokens(self, place: int) -> np.ndarray | None:
        """Return what a snapshot has taken in, int32 `[n]`; None of an empty place."""
        return self._tokens[place]

    def find_longest(self, tokens: np.ndarray) -> int | None:
        """Return the snapshot of the most of a text's first tokens."""
        best, length = None, 0
        for place, kept in enumerate(self._tokens):
            if kept is None or not length < len(kept) <= len(tokens) or kept[-1] != tokens[len(kept) - 1]:
                continue
            if np.array_equal(kept, tokens[: len(kept)]):
                best, length = place, len(kept)
        return best

    def _count_tokens(self, place: int | None) -> int:
        kept = None if place is None else self._tokens[place]
        return 0 if kept is None else len(kept)

    def resume_prompt(self, prompt: np.ndarray, common: int, *, has: int) -> Prefix:
        """Return the prefix of a prompt that has a snapshot, where the cache has its first `common` tokens.

        The last token is always computed.

        Args:
            has: tokens that the cache has there, of whatever text. Where that is no more, the prompt parts from nothing.
        """
        common = min(common, len(prompt) - 1)
        place = self.find_longest(prompt[:common])
        length = self._count_tokens(place)
        parts = has > common and common - length >= self._min_reuse
        return Prefix(length, state_place=place, cut=common if parts else 0)

    def is_worth(self, start: int, end: int, left: int, cut: int) -> bool:
        """Return whether a snapshot is to be taken where a prompt's piece ends.

        Args:
            start, end, left: tokens before the piece, up to its end, and after it.
            cut: as in `PromptPiece`.
        """
        is_due = self._interval is not None and end // self._interval > start // self._interval
        return end >= self._min_reuse and (is_due or left <= self._largest_step or end == cut)

    def pick_places(self, texts: Sequence[np.ndarray], needed: Collection[int]) -> list[int | None]:
        """Return for each text a place for a snapshot of it; None where there is one already, or no place is left.

        Args:
            needed: places that are not to be given away.
        """
        free = iter([place for place in (*self._unused, *self._used) if place not in needed])
        found: list[int | None] = []
        seen: set[bytes] = set()
        for text in texts:
            is_new = text.tobytes() not in seen and self._count_tokens(self.find_longest(text)) < len(text)
            seen.add(text.tobytes())
            found.append(next(free, None) if is_new else None)
        return found

    def keep_texts(self, texts: Mapping[str, np.ndarray], used: Collection[int]) -> dict[str, int]:
        """Give places to a step's snapshots and note them at once, for a caller that makes steps before the last one has run.

        Args:
            texts: what a snapshot would have taken in, by any name.
            used: places after which the step's requests continue.

        Returns:
            The place of each snapshot that is taken, by name.
        """
        for place in used:
            self.touch_place(place)
        kept = {}
        for (name, text), free in zip(texts.items(), self.pick_places(list(texts.values()), used), strict=True):
            if free is not None:
                self.set_place(free, text)
                kept[name] = free
        return kept

    def plan_step(self, step: Step, find: Callable[[str], RequestState]) -> tuple[KeptState, ...]:
        """Return what is kept of the rows that a step advances; no snapshot that the step itself needs gives its place.

        Args:
            find: returns the request of an id.
        """
        pieces: list[PromptPiece] = []
        texts: list[np.ndarray] = []
        for piece in step.pieces:
            state = find(piece.request_id)
            left = len(state.tokens) - piece.end
            if not state.request.atomic and self.is_worth(piece.start, piece.end, left, piece.cut):
                pieces.append(piece)
                texts.append(state.tokens[: piece.end])
        return tuple(
            KeptState(piece.request_id, piece.slot, len(text), place, piece.arrival)
            for piece, text, place in zip(pieces, texts, self.pick_places(texts, _needed_places(step)), strict=True)
            if place is not None
        )

    def apply_step(self, step: Step, live: Callable[[KeptState], RequestState | None]) -> None:
        """Follow what a step did.

        Args:
            live: returns the request of a snapshot; None where it was aborted since, so that the place holds nothing of use.
        """
        for place in _needed_places(step):
            self.touch_place(place)
        for kept in step.kept:
            state = live(kept)
            self.set_place(kept.place, None if state is None else state.tokens[: kept.length].copy())

    def set_place(self, place: int, tokens: np.ndarray | None) -> None:
        """Note the tokens of the snapshot that a place now has; None: it has nothing of use."""
        self._tokens[place] = tokens
        self._leave_order(place)
        self._unused = {**self._unused, place: None} if tokens is not None else {place: None, **self._unused}

    def touch_place(self, place: int) -> None:
        """Note that a prompt continues after a snapshot."""
        self._leave_order(place)
        self._used[place] = None
        if len(self._used) > len(self._tokens) // 2:
            oldest = next(iter(self._used))
            del self._used[oldest]
            self._unused[oldest] = None

    def _leave_order(self, place: int) -> None:
        self._unused.pop(place, None)
        self._used.pop(place, None)

    def forget_all(self) -> None:
        """Forget all snapshots."""
        self._tokens = [None] * len(self._tokens)
        self._unused, self._used = dict.fromkeys(range(len(self._tokens))), {}


def _needed_places(step: Step) -> list[int]:
    """Return the places of snapshots after which a step's requests continue."""
    prefixes = (piece.prefix for piece in step.pieces if piece.prefix is not None)
    return [prefix.state_place for prefix in prefixes if prefix.state_place is not None]
