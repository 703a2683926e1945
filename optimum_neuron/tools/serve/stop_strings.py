# SPDX-License-Identifier: Apache-2.0
"""Stop strings in a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Lets a text through up to the first stop string, and no part of one.

    Attributes:
        found: the stop string that ended the text; of two that begin at the same place the first in the list.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""  # may be the beginning of one
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Takes a piece; returns what stands before any stop string, whole or begun."""
        self._held += text
        places = [(place, number) for number, stop in enumerate(self._stops) if (place := self._held.find(stop)) >= 0]
        if places:
            place, number = min(places)
            self.found = self._stops[number]
            return self._take(place)
        return self._take(len(self._held) - self._begun())

    def finish(self) -> str:
        """What was held back: the text ended, and no stop string with it."""
        return self._take(len(self._held))

    def _take(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text

    def _begun(self) -> int:
        """Characters at the end that a stop string begins with."""
        most = min(max(map(len, self._stops), default=1) - 1, len(self._held))
        ends = (self._held[-count:] for count in range(most, 0, -1))
        return next((len(end) for end in ends if any(stop.startswith(end) for stop in self._stops)), 0)
