# SPDX-License-Identifier: Apache-2.0
"""Engines that take in requests at their own pace and are advanced step by step."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence

from .protocol import Generated, Prompt, Runtime


class SteppingRuntime(Runtime):
    """An engine that is advanced step by step."""

    @abstractmethod
    def add_request(self, prompt: Prompt, new_tokens: int) -> list[int]:
        """Hand a request over; return the list that gets its new tokens."""

    @abstractmethod
    def step(self) -> None:
        """Advance all requests."""

    @abstractmethod
    def is_busy(self) -> bool:
        """Return whether a request is not finished."""

    @abstractmethod
    def cancel(self) -> None:
        """End all requests, and forget them."""

    def generate(self, prompts: Sequence[Prompt], new_tokens: int) -> Generated:
        """Step until the row that began last has its tokens; steps count once all rows have begun.

        Rows that began earlier are ahead of it by then, so all are allowed more tokens.
        """
        spare = spare_steps(len(prompts)) if new_tokens > 1 else 0
        first = behind = fewest = 0.0
        start = now = time.perf_counter()
        rows = [self.add_request(prompt, new_tokens + spare) for prompt in prompts]
        while fewest < new_tokens:
            self.step()
            now, fewest = time.perf_counter(), min(map(len, rows))
            if fewest and not first:
                first, behind = now, fewest
        steps = fewest - behind
        rest = (now - first) * (new_tokens - 1) / steps if steps else 0.0
        generated = Generated(first - start, rest, [row[:new_tokens] for row in rows])
        self.cancel()
        while self.is_busy():
            self.step()
        return generated

    def serve(self, requests: Sequence[tuple[Prompt, int]]) -> int:
        rows = [self.add_request(prompt, new_tokens) for prompt, new_tokens in requests]
        while self.is_busy():
            self.step()
        self.cancel()
        return sum(map(len, rows))


def spare_steps(rows: int) -> int:
    """Return the steps by which a row may be ahead of the last: an engine takes in at least one prompt in two steps."""
    return 2 * rows
