# SPDX-License-Identifier: Apache-2.0
"""How steps are timed in an engine that takes requests in at its own pace: once all rows have begun, and none has ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from .protocol import Generated


def timed_steps(
    step: Callable[[], None], tokens: Callable[[], Sequence[Sequence[int]]], new_tokens: int, start: float
) -> Generated:
    """Steps until the row that began last has its tokens.

    Rows that began earlier are ahead of it by then, so they must be allowed more tokens: `spare_steps` of them.

    Args:
        step: advances all requests.
        tokens: all rows' tokens so far.
        start: when the requests were handed over, of `time.perf_counter`.
    """
    first = 0.0
    while True:
        step()
        now, rows = time.perf_counter(), tokens()
        fewest = min(map(len, rows))
        if fewest and not first:
            first, behind = now, fewest
        if fewest >= new_tokens:
            steps = fewest - behind
            rest = (now - first) * (new_tokens - 1) / steps if steps else 0.0
            return Generated(first - start, rest, [list(row[:new_tokens]) for row in rows])


def spare_steps(rows: int) -> int:
    """Steps by which a row may be ahead of the last: an engine takes in at least one prompt in two steps."""
    return 2 * rows
