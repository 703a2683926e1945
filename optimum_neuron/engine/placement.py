# SPDX-License-Identifier: Apache-2.0
"""What the planner asks of a cache, whether it has slots or blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from .block_pool import NO_MATCH, BlockMatch
from .request import RequestState
from .step import Preempted, PrefixReuse, Step


class Placement(NamedTuple):
    """Where a request goes on: its row, and, where it starts, what is in the cache of it already, and where it parts from others,
    as in `ScheduledChunk`."""

    slot: int
    reuse: PrefixReuse | None
    found: BlockMatch = NO_MATCH
    parts_at: int = 0

    @property
    def start(self) -> int:
        """Tokens of a request that starts that need not be computed."""
        return self.reuse.length if self.reuse else 0


class CacheDraft(Protocol):
    """What a step gives out of a cache, so far. Changes nothing outside of itself."""

    @property
    def preempted(self) -> Sequence[Preempted]:
        """Who gives back what they have before anybody gets something."""

    @property
    def open_slots(self) -> int:
        """Rows that requests may still start in."""

    def place(self, state: RequestState, reuse: bool) -> Placement | None:
        """Where a request would go on, which has a row or finds one; None where it cannot start for want of blocks."""

    def may_share(self, state: RequestState, length: int) -> bool:
        """False where no other request's contents share `length` tokens with those of this one."""

    def room(self, state: RequestState, placement: Placement | None) -> int:
        """Tokens by which a request could advance with what is left; 0 of one that cannot start."""

    def take(self, state: RequestState, placement: Placement, count: int) -> None:
        """Gives a request what it needs to advance by `count` tokens."""

    def close(self) -> None:
        """Lets nobody start any more."""

    def complete(self, step: Step, running: Mapping[int, RequestState]) -> Step:
        """A step with what is done to the cache before its graph runs.

        Args:
            running: requests that decode, by row; those of the step get what they need.
        """
