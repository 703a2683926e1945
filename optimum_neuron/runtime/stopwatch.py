# SPDX-License-Identifier: Apache-2.0
"""The stopwatch of all that measures steps."""

from __future__ import annotations

import time
from collections.abc import Callable


def seconds_of(call: Callable[[], object]) -> float:
    """Return how long a call takes, in seconds."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
