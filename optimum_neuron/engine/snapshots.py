# SPDX-License-Identifier: Apache-2.0
"""Snapshots of state that rows keep of all their tokens together: which tokens each has taken in, and who continues after it.

The state of a recurrence or a convolution, or compressed keys, cannot be cut: a prompt that starts like earlier tokens continues
where a snapshot of so many of them is. One is taken where a prompt ends; where the rest of it fits one step, as a prompt that
starts alike often parts after that; where a prompt parts from what was computed before, if no snapshot is near: the next one that
starts alike continues there; and, where asked for, every so many tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np

from ..config import NeuronConfig
from ..core import KeptState, Prefix, PromptPiece, Step
from .block_pool import BlockPool
from .queues import RequestState


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

    def find_longest(self, tokens: np.ndarray) -> tuple[int | None, int]:
        """Return the snapshot of the most of a text's first tokens, and how many; None and 0 where there is none."""
        best, length = None, 0
        for place, kept in enumerate(self._tokens):
            if kept is None or not length < len(kept) <= len(tokens) or kept[-1] != tokens[len(kept) - 1]:
                continue
            if np.array_equal(kept, tokens[: len(kept)]):
                best, length = place, len(kept)
        return best, length

    def resume_prompt(self, prompt: np.ndarray, common: int, *, has: int) -> Prefix:
        """Return the prefix of a prompt that has a snapshot, where the cache has its first `common` tokens. The last one is computed.

        Args:
            has: tokens that the cache has there, of whatever text. Where that is no more, the prompt parts from nothing.
        """
        common = min(common, len(prompt) - 1)
        place, length = self.find_longest(prompt[:common])
        parts = has > common and common - length >= self._min_reuse
        return Prefix(length, state=place, cut=common if parts else 0)

    def is_worth(self, start: int, end: int, left: int, cut: int) -> bool:
        """Return whether a snapshot is to be taken at the `end` of a prompt's piece, with so many tokens `left` after it."""
        is_due = self._interval is not None and end // self._interval > start // self._interval
        return end >= self._min_reuse and (is_due or left <= self._largest_step or end == cut)

    def pick_places(self, texts: Mapping[str, np.ndarray], needed: Collection[int]) -> dict[str, int]:
        """Return a place for a snapshot of each text that has none yet, as long as there are places that are not needed."""
        free = (place for place in (*self._unused, *self._used) if place not in needed)
        new = {text.tobytes(): name for name, text in reversed(list(texts.items()))}
        names = [name for name, text in texts.items() if new[text.tobytes()] == name]
        lacking = (name for name in names if self.find_longest(texts[name])[1] < len(texts[name]))
        return dict(zip(lacking, free, strict=False))

    def keep_texts(self, texts: Mapping[str, np.ndarray], used: Collection[int]) -> dict[str, int]:
        """Give places to a step's snapshots and note them at once, for a caller that makes steps before the last one has run.

        The step's requests continue after those that are `used`.
        """
        for place in used:
            self.touch_place(place)
        kept = self.pick_places(texts, used)
        for name, place in kept.items():
            self.set_place(place, texts[name])
        return kept

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
        for place in reversed(range(len(self._tokens))):
            self.set_place(place, None)


class StatePool(BlockPool):
    """Blocks of rows that keep state next to them: a prompt continues only where one of `places` has a snapshot of that, too."""

    keeps_state = True

    def __init__(self, config: NeuronConfig, min_reuse: int, places: int) -> None:
        super().__init__(config.kv_blocks, config.block_length, min_reuse)
        self.snapshots = SnapshotTable(places, min_reuse, config.prompt_capacity, config.state_snapshot_interval)

    def match_prompt(self, prompt: np.ndarray, exclude: Collection[int] = ()) -> Prefix:
        found = super().match_prompt(prompt, exclude)
        # After a full block there may be anything.
        has = len(found.blocks) * self.block_length + (1 if found.source is None else self._counts[found.source])
        resumed = self.snapshots.resume_prompt(prompt, found.length, has=has)
        return found.shorten(resumed.length, self.block_length)._replace(state=resumed.state, cut=resumed.cut)

    def plan_states(self, pieces: Sequence[PromptPiece], live: Mapping[str, RequestState]) -> tuple[KeptState, ...]:
        """Return what is kept of the rows that a step advances; no snapshot that the step itself needs gives its place."""
        worthy: dict[str, PromptPiece] = {}
        for piece in pieces:
            state = live[piece.request_id]
            left = len(state.tokens) - piece.end
            if not state.request.atomic and self.snapshots.is_worth(piece.start, piece.end, left, piece.cut):
                worthy[piece.request_id] = piece
        texts = {name: live[name].tokens[: piece.end] for name, piece in worthy.items()}
        places = self.snapshots.pick_places(texts, needed_places(piece.prefix for piece in pieces))
        return tuple(
            KeptState(name, worthy[name].slot, worthy[name].end, place, worthy[name].arrival)
            for name, place in places.items()
        )

    def follow_step(self, step: Step, live: Callable[[KeptState], RequestState | None]) -> None:
        super().follow_step(step, live)
        for place in needed_places(piece.prefix for piece in step.pieces):
            self.snapshots.touch_place(place)
        for kept in step.kept:
            state = live(kept)
            self.snapshots.set_place(kept.place, None if state is None else state.tokens[: kept.length].copy())

    def forget_all(self) -> None:
        super().forget_all()
        self.snapshots.forget_all()


def needed_places(prefixes: Iterable[Prefix | None]) -> list[int]:
    """Return the places of snapshots after which requests with these prefixes continue."""
    return [prefix.state for prefix in prefixes if prefix is not None and prefix.state is not None]
