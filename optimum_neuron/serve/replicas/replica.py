# SPDX-License-Identifier: Apache-2.0
"""What the front knows of each replica, and which one gets a request."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Replica:
    """A place behind the front, whose server may be replaced.

    Attributes:
        url: where its server listens, while it is up.
        live: requests that it has now.
        restarts: servers that were started after the first.
        lost: set when its server is given up: whoever waits for that one waits in vain.
    """

    index: int
    url: str | None = None
    live: int = 0
    restarts: int = 0
    lost: asyncio.Event = field(default_factory=asyncio.Event)

    def up(self, url: str) -> None:
        """Its server answers."""
        self.url = url

    def pause(self) -> None:
        """It gets no new requests; those that it has go on."""
        self.url = None

    def give_up(self) -> None:
        """Its server has ended, or answers nobody."""
        self.url = None
        self.lost.set()
        self.lost = asyncio.Event()

    @contextmanager
    def use(self) -> Iterator[None]:
        """Counts a request while it is there."""
        self.live += 1
        try:
            yield
        finally:
            self.live -= 1


def choose(replicas: Sequence[Replica], tried: Collection[Replica]) -> Replica | None:
    """Of those that are up and were not tried, the one with the fewest requests; None where there is none."""
    up = [replica for replica in replicas if replica.url is not None and not any(replica is each for each in tried)]
    return min(up, key=lambda replica: replica.live, default=None)
