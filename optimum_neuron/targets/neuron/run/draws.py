# SPDX-License-Identifier: Apache-2.0
"""Which samplers run after a step: those of the groups of rows in which a token is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ....step.sampling.chosen import slots_of_rows
from ....step.sampling.sampler import TEMPERATURE
from ....step.spec import DECODE, SAMPLING_PARAMS, UNIFORMS
from ..graph_io import SAMPLERS, GraphIO


@dataclass(frozen=True)
class Draw:
    """A graph that draws a group's tokens, and where a step has what it takes and replaces.

    Attributes:
        graph: its name.
        positions, sampling_params, uniforms: numbers of a step's inputs.
        slots: the same of chunk rows' slots; None of decode rows.
        tokens: number of a step's output.
    """

    graph: str
    positions: int
    sampling_params: int
    uniforms: int
    slots: int | None
    tokens: int

    def is_due(self, inputs: Sequence[Tensor]) -> bool:
        """Whether a row that is not idle is to be drawn: all others keep the largest, which the step has chosen."""
        return bool(((inputs[self.sampling_params][:, TEMPERATURE] > 0) & (inputs[self.positions][:, 0] >= 0)).any())

    def inputs(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """What the sampler takes, of a step's inputs."""
        slots = slots_of_rows(inputs[self.positions], None if self.slots is None else inputs[self.slots])
        return [inputs[self.sampling_params], inputs[self.uniforms], slots]


def draws(calls: Mapping[str, Sequence[str]], graphs: Mapping[str, GraphIO]) -> dict[str, tuple[Draw, ...]]:
    """Return the draws of each step; `calls` names the inputs of each step in order."""
    return {name: tuple(_draws(call, graphs[name])) for name, call in calls.items()}


def _draws(call: Sequence[str], io: GraphIO) -> list[Draw]:
    returned = [each.name for each in io.outputs if each.alias_of is None]
    return [
        Draw(
            graph,
            call.index(f"{group}.position_ids"),
            call.index(f"{group}.{SAMPLING_PARAMS}"),
            call.index(f"{group}.{UNIFORMS}"),
            None if group == DECODE else call.index(f"{group}.seq_ids"),
            returned.index(f"{group}.tokens"),
        )
        for group, graph in SAMPLERS.items()
        if f"{group}.{SAMPLING_PARAMS}" in call
    ]
