# SPDX-License-Identifier: Apache-2.0
"""Checks of the graphs that copy what slots hold: each raises CheckError, or returns what it copied."""

from __future__ import annotations

from typing import Any

import torch

from ...artifact.artifact import Artifact
from ...runtime.runner import GraphRunner
from ...runtime.step_tensors import Chunk
from ...step.state_sizes import BY_TOKEN
from ...step.state_specs import slot_state_specs
from .prompts import prefill, prompt_of
from .report import CheckError


def check_slot_copy(artifact: Artifact, runner: GraphRunner) -> dict[str, Any]:
    """The first columns of a slot, or block, are those of another."""
    length = min(17, runner.config.block_length)  # the first slot's first block is the cache's
    runner.reserve([length])
    prefill(runner, 0, prompt_of(artifact, length, seed=5), runner.config.prefill_chunk_size)
    runner.executable.copy_slot(0, 1, length)
    states = [each.name for each in artifact.states() if each.name.startswith(BY_TOKEN)]
    for name in states:
        tensor = runner.executable.read_state(name).contiguous().view(torch.uint8)  # torch compares no fp8
        if not torch.equal(tensor[1, :, :length], tensor[0, :, :length]) or not tensor[0, :, :length].any():
            raise CheckError(f"{name} of slot 1 is not that of slot 0")
    return {"states": len(states)}


def check_snapshots(artifact: Artifact, runner: GraphRunner) -> dict[str, Any]:
    """A snapshot is what its slot had, whatever that goes on to have, and a slot gets it back."""
    length = min(17, runner.config.sequence_length - 1)
    runner.reserve([length + 1])
    prefill(runner, 0, prompt_of(artifact, length, seed=6), runner.config.prefill_chunk_size)
    states = [each.name for each in slot_state_specs(runner.config, artifact.model)]
    expected = {name: runner.executable.read_state(name)[0].clone() for name in states}
    place = runner.config.snapshot_places - 1
    runner.keep_state(0, place)
    runner.prefill([Chunk(0, prompt_of(artifact, 1, seed=7))])
    runner.kept.restore(place, 0)
    for name, state in expected.items():
        if not torch.equal(runner.executable.read_state(name)[0], state):
            raise CheckError(f"{name} of slot 0 is not what snapshot {place} was taken of")
    return {"states": len(states), "places": place + 1}
