# SPDX-License-Identifier: Apache-2.0
"""What slots are expected to keep of the tokens that steps, and then samplers, choose."""

from __future__ import annotations

from collections.abc import Sequence

from ...step.spec import CHUNK, DECODE
from ...targets.neuron.graph_io import CHOSEN
from .expected import Expected
from .recording import Step, drawn


def expect_chosen(expected: Expected, steps: Sequence[Step]) -> None:
    """Adds the token of each slot behind each step: what its row may have, the last of a prompt, or else what it was.

    Args:
        expected: with the tokens of all rows in use.
    """
    for number, step in enumerate(steps):
        if step.kept is None:
            continue
        slots = [(DECODE, row, row) for row in step.rows[DECODE]]
        slots += [(CHUNK, row, int(step.inputs[f"{CHUNK}.seq_ids"][row])) for row in sorted(step.rows[CHUNK])]
        for name_of in (str, drawn):
            kept: dict[int, tuple[int, ...]] = {slot: (int(token),) for slot, token in enumerate(step.kept)}
            for group, row, slot in slots:
                kept[slot] = expected.tokens[number, name_of(f"{group}.tokens")][row]
            expected.tokens[number, name_of(CHOSEN)] = kept
