# SPDX-License-Identifier: Apache-2.0
"""Who holds each slot of the cache, and which tokens its rows contain. Knows nothing of progress or devices."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np

from .placement import Placement
from .request import RequestState
from .snapshots import Resumption, SnapshotTable
from .step import Assignment, KeptState, Preempted, PrefixReuse, ScheduledChunk, Step


# A shorter common prefix saves no step, and to copy it costs more than to compute it along with the rest.
MIN_REUSE = 16


class SlotTable:
    """The slots of a cache `[batch_size, sequence_length]`.

    The contents of a slot are the tokens whose cache rows another request may reuse. They outlive the request that
    computed them, until another one takes the slot.

    Args:
        min_reuse: tokens that a common prefix must have to be reused.
        snapshots: of state that slots keep beside rows; None where they keep none.
    """

    def __init__(
        self, batch_size: int, sequence_length: int, min_reuse: int = MIN_REUSE, snapshots: SnapshotTable | None = None
    ) -> None:
        self.snapshots = snapshots
        self._tokens = np.zeros((batch_size, sequence_length), np.int32)
        self._lengths = np.zeros(batch_size, np.int64)
        # The same memory without numpy, for what is done for each token.
        self._cells, self._counts = self._tokens.data, self._lengths.data
        self._last_used = np.zeros(batch_size, np.int64)
        self._free = np.ones(batch_size, bool)
        self._holders: list[str | None] = [None] * batch_size
        self._uses = 0
        self._min_reuse = max(1, min_reuse)
        self.free_count = batch_size

    @property
    def used(self) -> int:
        """Slots that requests hold."""
        return len(self._holders) - self.free_count

    def draft(self, holders: Iterable[RequestState] = ()) -> SlotDraft:
        """What the next step may give out; who has a slot needs no more."""
        return SlotDraft(self)

    @property
    def free_slots(self) -> list[int]:
        """Slots that no request holds, ascending."""
        return np.flatnonzero(self._free).tolist()

    def contents(self, slot: int) -> np.ndarray:
        """Tokens whose cache rows can be reused, int32 `[length]`, read-only and valid until the next change."""
        view = self._tokens[slot, : self._lengths[slot]]
        view.setflags(write=False)
        return view

    def hold(self, slot: int, request_id: str, reuse: PrefixReuse | None = None) -> None:
        """Gives a free slot to a request, which takes over what `reuse` says; its contents stay until they are set.

        Raises:
            RuntimeError: another request holds the slot.
        """
        if not self._free[slot]:
            raise RuntimeError(f"slot {slot} is held by request {self._holders[slot]!r}, not free for {request_id!r}")
        self._free[slot] = False
        self._holders[slot] = request_id
        self.free_count -= 1
        self.touch(slot)
        if reuse is not None and reuse.source_slot is not None:
            self.touch(reuse.source_slot)

    def release(self, slot: int) -> None:
        """Takes a slot back and keeps its contents.

        Raises:
            RuntimeError: no request holds the slot.
        """
        if self._free[slot]:
            raise RuntimeError(f"slot {slot} is free and cannot be released")
        self._free[slot] = True
        self._holders[slot] = None
        self.free_count += 1
        self.touch(slot)

    def touch(self, slot: int) -> None:
        """Marks a slot as the most recently used one."""
        self._uses += 1
        self._last_used[slot] = self._uses

    def write(self, slot: int, start: int, tokens: np.ndarray) -> None:
        """Sets contents `[start, start + len(tokens))` and ends them there, whatever was behind."""
        end = start + len(tokens)
        self._tokens[slot, start:end] = tokens
        self._lengths[slot] = end

    def append(self, slot: int, token_id: int) -> None:
        """Adds one token behind the contents."""
        length = self._counts[slot]
        self._cells[slot, length] = token_id
        self._counts[slot] = length + 1

    def change(self, step: Step, live: Callable[[Assignment | KeptState], RequestState | None]) -> None:
        """Follows what a step kept; it assigns no slots apart from its chunks."""
        if self.snapshots is not None:
            self.snapshots.change(step, live)

    def overwritten(self, chunk: ScheduledChunk) -> None:
        """Notes that a slot got tokens that nobody may reuse; what a first chunk continues in place stays."""
        if chunk.is_first:
            in_place = chunk.reuse is not None and chunk.reuse.source_slot == chunk.slot
            self._lengths[chunk.slot] = min(chunk.start if in_place else 0, int(self._lengths[chunk.slot]))

    def clear(self) -> None:
        """Forgets the contents of all slots, and all snapshots."""
        self._lengths.fill(0)
        if self.snapshots is not None:
            self.snapshots.clear()

    def may_share(self, prompt: np.ndarray, length: int) -> bool:
        """False where no slot shares `length` tokens with a prompt. Looks at the last of them only: far cheaper than
        `match`."""
        return bool(((self._lengths >= length) & (self._tokens[:, length - 1] == prompt[length - 1])).any())

    def match(self, prompt: np.ndarray, exclude: Collection[int] = ()) -> tuple[int, int]:
        """The slot whose contents share the longest prefix with a prompt, and how many tokens that is.

        Of equals, a free slot that has nothing beyond the prefix comes first: it can be continued in place. Fewer than
        `min_reuse` tokens count as none: the length is 0.

        Args:
            prompt: int32 `[n]`.
            exclude: slots to leave out.
        """
        lengths = np.minimum(self._lengths, len(prompt))
        lengths[list(exclude)] = 0
        least = self._min_reuse
        rows = np.flatnonzero(lengths >= least)
        if rows.size:  # most prompts differ early: the whole length is compared only where the first tokens agree
            rows = rows[(self._tokens[rows, :least] == prompt[:least]).all(axis=1)]
        if not rows.size:
            return 0, 0
        columns = int(lengths[rows].max())
        same = self._tokens[rows, :columns] == prompt[:columns]
        common = np.where(same.all(axis=1), columns, same.argmin(axis=1))
        common = np.minimum(common, lengths[rows])
        ends_there = self._free[rows] & (common == self._lengths[rows])
        best = int(np.argmax(2 * common + ends_there))
        return int(rows[best]), int(common[best])

    def assign(self, prompt: np.ndarray, taken: Collection[int], reuse: bool) -> Placement:
        """Picks a free slot for a prompt, and the prefix that it need not compute. Changes nothing.

        At least the last prompt token is left to compute: its logits choose the first generated token. A prefix is
        continued in place where that destroys nothing beyond it that is not to be overwritten anyway; otherwise it is
        copied from its slot, which a request may hold. Where slots keep state, it is as long as a snapshot has it.

        Args:
            prompt: int32 `[n]`.
            taken: slots that the same step gives to others: neither free nor a source.
            reuse: whether to look for a prefix at all.

        Raises:
            RuntimeError: no slot is left.
        """
        victim = self._victim(taken)
        source, common = self.match(prompt, taken) if reuse else (0, 0)
        if self.snapshots is None:
            found = Resumption(min(common, len(prompt) - 1))
        else:
            found = self.snapshots.resume(prompt, common, has=int(self._lengths[source]))
        if found.length < self._min_reuse:
            return Placement(victim, None, parts_at=found.parts_at)
        in_place = self._free[source] and (common == self._lengths[source] or source == victim)
        known = PrefixReuse(source, found.length, found.snapshot)
        return Placement(source if in_place else victim, known, parts_at=found.parts_at)

    def _victim(self, taken: Collection[int]) -> int:
        """An empty slot, else the free one that was used least recently."""
        if self.free_count <= len(taken):
            raise RuntimeError("no slot is free")
        age = np.where(self._free, self._last_used * (self._lengths > 0), self._uses + 1)
        age[list(taken)] = self._uses + 1
        return int(age.argmin())


class SlotDraft:
    """A step's use of slots so far: each has room for all tokens of a request, so nobody is preempted.

    Args:
        most: requests that may start, where these are fewer than free slots.
    """

    preempted: Sequence[Preempted] = ()

    def __init__(self, slots: SlotTable, most: int | None = None) -> None:
        self._slots = slots
        self._most = slots.free_count if most is None else min(most, slots.free_count)
        self._taken: set[int] = set()

    @property
    def open_slots(self) -> int:
        return self._most - len(self._taken)

    def place(self, state: RequestState, reuse: bool) -> Placement:
        if state.slot is not None:
            return Placement(state.slot, None)
        return self._slots.assign(state.tokens, self._taken, reuse)

    def may_share(self, state: RequestState, length: int) -> bool:
        return self._slots.may_share(state.tokens, length)

    def room(self, state: RequestState, placement: Placement | None) -> int:
        return len(state.tokens)

    def take(self, state: RequestState, placement: Placement, count: int) -> None:
        if state.slot is None:
            self._taken.add(placement.slot)

    def close(self) -> None:
        raise RuntimeError("no request waits for more than a slot")

    def complete(self, step: Step, running: Mapping[int, RequestState]) -> Step:
        return step
