# SPDX-License-Identifier: Apache-2.0
"""Canaries: numbers that spread over all they are added to or multiplied by, where no token may see them."""

from __future__ import annotations

import math

import torch
from helpers import (
    LENGTH,
    as_tensor,
    decode_rows,
    fill_rows,
    random_tokens,
    read_state,
    read_states,
    state_names,
    write_state,
)
from torch import Tensor

from optimum_neuron.core import PromptPiece
from optimum_neuron.runtime.runner import GraphRunner
from optimum_neuron.step.model_spec import ModelSpec


CANARIES = (math.nan, math.inf, -math.inf)
# Chunks of each slot, and which slots decode beside them. A chunk shorter than its row has padding.
STEPS: tuple[tuple[dict[int, int], tuple[int, ...]], ...] = (
    ({0: 5}, ()),
    ({1: 8, 0: 2}, ()),
    ({1: 3}, (0,)),
    ({0: 16}, ()),
    ({}, (1, 0)),
    ({0: 1}, (1,)),
    ({}, (1,)),
)


def fill_unseen(runner: GraphRunner, model: ModelSpec, value: float) -> None:
    """Fills the trash row, free slots, and what other slots hold beyond their lengths."""
    lengths = [*runner.lengths.tolist(), 0]
    for name in state_names(runner, model):
        state = read_state(runner.executable, name)
        for row, length in enumerate(lengths):
            if ".conv_" not in name:
                state[row, :, length:] = value
            elif length == 0:  # else it belongs to the tokens of its slot
                state[row] = value
        write_state(runner.executable, name, state)


def serve_steps(
    runner: GraphRunner, model: ModelSpec, unseen: float | None = None, neighbor: float | None = None
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Slots 0 and 1 take in prompts and decode, in steps of all kinds.

    Args:
        unseen: fills what no token sees, before each step; None: zeros are there, and what steps leave.
        neighbor: fills all that slot 2 keeps, which decodes beside them; None: it is free.

    Returns:
        The logits of both slots after each of their steps, and their states, with zeros where nothing of theirs is.
    """
    everything = range(runner.config.batch_size + 1)
    runner.reset_slots()
    fill_rows(runner, model, everything, 0.0)
    streams = [random_tokens(LENGTH, seed=slot) for slot in (0, 1)]
    results = []
    for counts, decoding in STEPS:
        starts = runner.lengths.tolist()
        chunks = [PromptPiece(slot, streams[slot][starts[slot] :][:count]) for slot, count in counts.items()]
        decode = {slot: int(streams[slot][starts[slot]]) for slot in decoding}
        if neighbor is not None:
            runner.lengths[2] = max(runner.lengths[2], 7)
            fill_rows(runner, model, [2], neighbor)
            decode[2] = 9
        if unseen is not None:
            fill_unseen(runner, model, unseen)
        output = runner.run_step(chunks, decode_rows(runner, decode) if decode else None)
        if output.chunk_logits is not None:
            results += [as_tensor(output.chunk_logits[row]) for row in range(len(chunks))]
        if output.decode_logits is not None:
            results += [as_tensor(output.decode_logits[slot]) for slot in decoding]
    states = _own_states(runner, model)
    runner.reset_slots()
    fill_rows(runner, model, everything, 0.0)  # runners are shared
    return results, states


def _own_states(runner: GraphRunner, model: ModelSpec) -> dict[str, Tensor]:
    states = {name: state[:2] for name, state in read_states(runner, model).items()}
    for name, state in states.items():
        if ".conv_" not in name:
            for slot in (0, 1):
                state[slot, :, runner.lengths[slot] :] = 0.0
    return states


def same_bits(left: tuple[list[Tensor], dict[str, Tensor]], right: tuple[list[Tensor], dict[str, Tensor]]) -> bool:
    """Whether two runs of `serve_steps` gave the same, none of it NaN."""
    return (
        len(left[0]) == len(right[0])
        and all(map(torch.equal, left[0], right[0]))
        and all(torch.equal(left[1][name], right[1][name]) for name in right[1])
    )
