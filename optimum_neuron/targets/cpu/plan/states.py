# SPDX-License-Identifier: Apache-2.0
"""Which steps of a plan a run needs whose outputs nobody reads."""

from __future__ import annotations

from collections.abc import Iterator

from .program import Convolve, Linears, Map, Operand, Plan, Step, TorchCall, Walk, WriteCache, WriteCodes


_OF_A_RUN = ("input", "output", "arena")


def steps_for_states(plan: Plan) -> int:
    """How many of the steps there are up to the last one that writes to what outlives a run; those behind it serve the outputs alone."""
    return max(
        (
            number + 1
            for number, step in enumerate(plan.steps)
            if any(plan.buffers[each.buffer].kind not in _OF_A_RUN for each in _written(step))
        ),
        default=0,
    )


def _written(step: Step) -> Iterator[Operand]:
    """What a step writes to."""
    if isinstance(step, Map):
        yield from (item.access for item in step.items if item.op == "store" and item.access is not None)
    elif isinstance(step, Linears):
        yield from (layer.output for layer in step.layers)
    elif isinstance(step, WriteCache):
        yield step.cache
    elif isinstance(step, WriteCodes):
        yield from (step.codes, step.scale)
    elif isinstance(step, TorchCall):
        yield from (each for each in step.outputs if each is not None)
        if not step.outputs:  # it writes to its first argument
            yield step.arguments[0]["tensor"]
    else:
        yield step.output
        if isinstance(step, Convolve | Walk):
            yield step.state
