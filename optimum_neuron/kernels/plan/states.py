# SPDX-License-Identifier: Apache-2.0
"""Which steps of a plan a run needs whose outputs nobody reads."""

from __future__ import annotations

from .effects import written
from .program import Plan


_OF_A_RUN = ("input", "output", "arena")


def steps_for_states(plan: Plan) -> int:
    """How many of the steps there are up to the last one that writes to what outlives a run; those behind it serve the outputs alone."""
    return max(
        (
            number + 1
            for number, step in enumerate(plan.steps)
            if any(plan.buffers[each.buffer].kind not in _OF_A_RUN for each in written(step))
        ),
        default=0,
    )
