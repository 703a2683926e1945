# SPDX-License-Identifier: Apache-2.0
"""Snapshots of state on devices that fakes play: in the memory of each rank, behind steps that run ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes.tools import Sdk, make_plan
from helpers import artifact_runner, eager_runner, export_tiny, generate, random_tokens, tiny_config
from recurrent import model

from optimum_neuron.artifact.artifact import Artifact
from optimum_neuron.core import Request
from optimum_neuron.engine.engine import Engine
from optimum_neuron.step.model_spec import ConvolutionState, LayerCache, ModelSpec, RecurrentState
from optimum_neuron.targets.neuron.copy_graphs import copy_graphs
from optimum_neuron.targets.neuron.lowering.lower import lower_copy
from optimum_neuron.targets.neuron.run.ranks import RankedExecutable
from optimum_neuron.targets.neuron.run.runtimes import load_graphs


pytest_plugins = ("fakes.plugin",)
RANKS = 2
# A rank's part: a head of keys, half of the channels and of the heads of states.
PART = ModelSpec(
    300,
    (LayerCache(1, 1, 4, 4),),
    (ConvolutionState(0, 0, 3, 6),),
    (RecurrentState(0, 0, 2, 4, 5, 9),),
    num_embeddings=300,
)


@pytest.mark.parametrize(("target", "package"), [("trn2", "lite"), ("inf2", "nxd")])
def test_each_rank_keeps_its_own_part(target: str, package: str, neuron_sdk: Sdk, tmp_path: Path) -> None:
    """All of a slot's state but keys and values, whatever the place holds; and none of any other slot or place."""
    neuron_sdk(target, package)
    config = tiny_config(target=target, tensor_parallel_size=RANKS, state_snapshots=2)
    weights = [{"tensor_parallel.rank": torch.tensor([rank], dtype=torch.int32)} for rank in range(RANKS)]
    graphs = [lower_copy(each, RANKS) for each in copy_graphs(config, PART)]
    loaded: Any = load_graphs(make_plan(tmp_path / "graphs", graphs, target, *weights))
    assert isinstance(loaded, RankedExecutable)
    try:
        held = {}
        for name in loaded._states:
            state = loaded.read_state(name)
            held[name] = torch.randn(state.shape) if state.is_floating_point() else torch.arange(len(state)).int()
            if name.startswith("snapshots.") and state.is_floating_point():
                held[name][1] = torch.nan
            loaded.write_state(name, held[name])
        loaded.keep_state(2, 1)
        loaded.restore_state(1, 0)
        for name, state in held.items():
            kept = held[name.removeprefix("snapshots.")]
            if name.startswith("snapshots."):
                state[1] = kept[2]
            elif not name.startswith(("kv_cache.key", "kv_cache.value")):
                state[0] = kept[2]
            assert torch.equal(loaded.read_state(name), state), name
    finally:
        loaded.close()


@pytest.mark.full  # on hlo the engine does, and the test above shows what a device adds
def test_the_engine_goes_on_behind_snapshots(neuron_sdk: Sdk, tmp_path: Path) -> None:
    neuron_sdk("trn2", "lite")
    model("gated delta").save_pretrained(tmp_path / "checkpoint")
    path = export_tiny(tmp_path / "checkpoint", tmp_path / "out", target="trn2", state_snapshots=3)
    artifact, runner = Artifact.open(path), artifact_runner(path)
    engine, eager = (
        Engine(runner, vocab_size=artifact.model.vocab_size),
        eager_runner(model("gated delta"), tiny_config()),
    )
    text = random_tokens(31, seed=11)
    for number, has in enumerate((0, 0, 31)):
        prompt = np.concatenate([text, random_tokens(20 - number, seed=number)])
        engine.add_request(Request(request_id="a", prompt_token_ids=prompt, max_new_tokens=4))
        assert [event.token_id for event in engine.run_requests()] == generate(eager, prompt, 4)[0]
        assert engine.statistics.prefix_hit_tokens == has
