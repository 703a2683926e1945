# SPDX-License-Identifier: Apache-2.0
"""Snapshots of state on devices that fakes play: in the memory of each rank, behind steps that run ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.tools import Sdk, make_plan
from helpers import read_state, tiny_config, write_state

from optimum_neuron.step.attention.state import KeyValueState
from optimum_neuron.step.features.convolution.state import ConvolutionState
from optimum_neuron.step.features.recurrence.state import RecurrentState
from optimum_neuron.step.model_spec import ModelSpec
from optimum_neuron.targets.neuron.graphs.state_graphs import copy_graphs
from optimum_neuron.targets.neuron.lowering.lower import lower_state_graph
from optimum_neuron.targets.neuron.run.ranks import RankedExecutable


pytest_plugins = ("fakes.plugin",)
RANKS = 2
# A rank's part: a head of keys, half of the channels and of the heads of states.
PART = ModelSpec(
    300,
    (KeyValueState(1, 1, 4, 4), ConvolutionState(0, 0, 3, 6), RecurrentState(0, 0, 2, 4, 5, 9)),
    num_embeddings=300,
)


@pytest.mark.parametrize(("target", "package"), [("trn2", "nrt"), ("inf2", "nxd")])
def test_each_rank_keeps_its_own_part(target: str, package: str, neuron_sdk: Sdk, tmp_path: Path) -> None:
    """All of a slot's state but keys and values, whatever the place holds; and none of any other slot or place."""
    neuron_sdk(target, package)
    config = tiny_config(target=target, tensor_parallel_size=RANKS, state_snapshots=2)
    weights = [{"tensor_parallel.rank": torch.tensor([rank], dtype=torch.int32)} for rank in range(RANKS)]
    graphs = [lower_state_graph(each, world_size=RANKS) for each in copy_graphs(config, PART)]
    loaded: Any = RankedExecutable(make_plan(tmp_path / "graphs", graphs, target, *weights))
    try:
        held = {}
        for name in loaded._states:
            state = read_state(loaded, name)
            held[name] = torch.randn(state.shape) if state.is_floating_point() else torch.arange(len(state)).int()
            if name.startswith("snapshots.") and state.is_floating_point():
                held[name][1] = torch.nan
            write_state(loaded, name, held[name])
        loaded.keep_state(2, 1)
        loaded.restore_state(1, 0)
        for name, state in held.items():
            kept = held[name.removeprefix("snapshots.")]
            if name.startswith("snapshots."):
                state[1] = kept[2]
            elif not name.startswith(("kv_cache.key", "kv_cache.value")):
                state[0] = kept[2]
            assert torch.equal(read_state(loaded, name), state), name
    finally:
        loaded.close()
