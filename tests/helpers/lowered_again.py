# SPDX-License-Identifier: Apache-2.0
"""A model of a layer, what its recorded steps are to make, and graphs of it that are lowered again, whatever was changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_config
from tiny import TINY_SIZES
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from optimum_neuron.checkpoints.checkpoint import Checkpoint
from optimum_neuron.parity.inspect import inspect_model
from optimum_neuron.step.attention.kv_cache import KVCache
from optimum_neuron.step.state_specs import state_specs
from optimum_neuron.targets import get_target
from optimum_neuron.targets.neuron.graphs.state_graphs import copy_graphs, score_graphs
from optimum_neuron.targets.neuron.lowering import lower
from optimum_neuron.targets.neuron.lowering.lower_all import rank_model
from optimum_neuron.targets.neuron.lowering.split_tokens import SumsRule
from optimum_neuron.targets.neuron.sdk.hardware import chip_of
from optimum_neuron.targets.neuron.sharding import shard_plan
from optimum_neuron.tools.certify.comparison import Comparison, Expected, compare, expect_results
from optimum_neuron.tools.certify.host_ranks import LoweredModule
from optimum_neuron.tools.certify.recording import record_config
from optimum_neuron.tools.certify.reference import run_reference, state_parts, state_scales
from optimum_neuron.tools.certify.setup import Setup, Trial


@dataclasses.dataclass
class Case:
    """A model of a layer that has a window and whose projections have biases, and what its steps are to make."""

    setup: Setup
    expected: Expected
    scales: dict[str, int]

    def lower(self, *names: str, split: bool | None = None) -> dict[str, LoweredModule]:
        """The named kinds of graphs.

        Args:
            split: whether ranks have parts of the tokens; None: where it takes less time.
        """
        config, folder = self.setup.trial.config, self.setup.folder
        rank = rank_model(folder, config, self.setup.tied, trust_remote_code=False)
        ranks, cache = self.setup.ranks, KVCache(state_specs(config, rank.spec))
        sums = None if rank.plan is None else SumsRule(chip_of(config.target), rank.plan.whole, split)
        graphs = [
            lower.lower_step(rank.model, cache, spec, rank.ops, rank.vocab_size, ranks, rank.columns, sums)
            for spec in self.setup.graphs
            if spec.kind in names
        ]
        others = score_graphs(config, rank.vocab_size)
        others += tuple(each for each in copy_graphs(config, rank.spec) if each.name in names)
        graphs += [lower.lower_state_graph(each, rank.vocab_size, rank.plan) for each in others]
        return {graph.name: LoweredModule(graph.hlo, graph.io) for graph in graphs}

    def compare(self, modules: Mapping[str, LoweredModule]) -> list[Comparison]:
        setup = dataclasses.replace(self.setup, modules=modules)
        return compare(self.expected, setup.execute_steps("float32", self.scales))


def _checkpoint(folder: Path, window: int) -> PreTrainedModel:
    config = Qwen2Config(
        **TINY_SIZES | {"num_hidden_layers": 1}, use_sliding_window=True, sliding_window=window, max_window_layers=0
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) / 10)
    model.save_pretrained(folder)
    return Checkpoint(folder, None, str(folder), trust_remote_code=False).load_model("float32")


def make_case(folder: Path, ranks: int, *names: str, window: int = 8, **sizes: Any) -> Case:
    """Only the named graphs run: the mixed one has decode rows and chunk rows."""
    model = _checkpoint(folder / "checkpoint", window)
    config = tiny_config(target="trn2", tensor_parallel_size=ranks, **sizes)
    spec = inspect_model(model)
    artifact = folder / "artifact"
    (artifact / "weights").mkdir(parents=True)
    model.config.save_pretrained(artifact)
    tied = get_target("trn2").write_model(model, config, artifact)
    steps = tuple(step for step in record_config(config, spec) if step.graph.startswith(names))
    parts = None if ranks == 1 else state_parts(shard_plan(model, ranks), spec, model)
    setup = Setup(artifact, Trial(artifact, config, config, 1, 1), spec, tied, {}, steps, parts)
    states = setup.state_specs("float32")
    scales = state_scales(model, states, setup.graphs, spec, steps)
    one, moved = (
        run_reference(model, states, setup.graphs, spec, steps, scales, shake=shake) for shake in (False, True)
    )
    return Case(setup, expect_results(one, moved, steps, "float32", ranks, parts), scales)


def wrap(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, changed: Callable[..., Any]) -> None:
    """Replaces a function by one that gets it as its first argument."""
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: changed(original, *args, **kwargs))


def places(comparisons: list[Comparison]) -> list[str]:
    """The comparisons that do not hold, in words."""
    return [str(each) for each in comparisons if not each.holds]
