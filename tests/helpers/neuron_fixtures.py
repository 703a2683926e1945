# SPDX-License-Identifier: Apache-2.0
"""Fixtures of tests that lower graphs to HLO."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import recurrent
from helpers import artifact_runner, export_tiny
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP

from optimum_neuron.artifact.artifact import Artifact
from optimum_neuron.artifact.quantization import QUANTIZATION_NAME
from optimum_neuron.config import NeuronConfig
from optimum_neuron.hub.collect import read_certificate
from optimum_neuron.hub.facts import Certified
from optimum_neuron.runtime.runner import GraphRunner
from optimum_neuron.step.features.codes.modules import weight_formats
from optimum_neuron.targets.neuron.sharding import ShardPlan


def certificate_of(folder: Path) -> Certified:
    found = read_certificate(Artifact.open(folder))
    assert found is not None
    return found


def mixed_runner(path: Path) -> GraphRunner:
    """Every step in the mixed graph, so that all bits of a token come from the same computation."""
    artifact = Artifact.open(path)
    executable = artifact_runner(path).executable
    return GraphRunner(executable, artifact.config, artifact.graphs, artifact.model, deterministic=True)


@pytest.fixture(scope="session", autouse=True)
def lowered_once() -> Iterator[None]:
    """Graphs of one model at one config are lowered once, for whatever target; test_lowering.py shows that they come out the same.

    Not those of models with experts or for several ranks, whose form follows from the chip.
    """
    if importlib.util.find_spec("torch_xla") is None:
        yield
        return
    from optimum_neuron.targets.neuron.lowering import lower, lower_all, split_tokens, weight_uses

    graphs: dict[Any, list[Any]] = {}
    layouts: dict[Any, Any] = {}
    others: dict[Any, Any] = {}
    lower_graphs, lower_state, trace_first = lower_all.lower_all, lower_all.lower_state_graph, lower_all.trace_first

    def key(model_config: str, config: NeuronConfig, *others: object) -> tuple[object, ...]:
        # What tests change of a model's code or of the lowering, too.
        changed = (LlamaMLP.forward, lower_all.NEURON_OPS, weight_uses.use_stored_weights, split_tokens.COLLECTIVE_S)
        by_chip = "experts" in model_config or config.tensor_parallel_size > 1
        same = config if by_chip else dataclasses.replace(config, target="hlo")
        return (model_config, same, *others, changed)

    def lower_once(
        folder: Path, config: NeuronConfig, tied: Mapping[str, str], *, first: Any = None, **options: bool
    ) -> Iterator[Any]:
        quantized = folder / QUANTIZATION_NAME
        formats = quantized.read_text() if quantized.exists() else None
        found = key((folder / "config.json").read_text(), config, formats, tuple(tied.items()), *options.values())
        if found not in graphs:
            graphs[found] = list(lower_graphs(folder, config, tied, first=first, **options))
        return iter(graphs[found])

    def lower_state_once(graph: Any, vocab_size: int, plan: ShardPlan | None, ranks: int) -> Any:
        """Lower a sampler or a copy once for all models of these sizes."""
        computed = [getattr(lower, name) for name in ("sample", "logprobs", "ChosenTokens", "KVCache")]
        found = (graph, vocab_size, plan and (plan.world_size, plan.vocab_size), ranks, *computed)
        found += lower.RowCopy.forward, lower.ScoreModule.forward
        if found not in others:
            others[found] = lower_state(graph, vocab_size, plan, ranks)
        return others[found]

    def trace_once(model: PreTrainedModel, plan: ShardPlan, config: NeuronConfig) -> Any:
        found = key(model.config.to_json_string(), config, str(model.dtype), str(weight_formats(model)))
        if found in layouts:  # and its graphs are lowered, or are traced anew: a program is lowered once
            return None, layouts[found]
        first, layouts[found] = trace_first(model, plan, config)
        return first, layouts[found]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lower_all, "lower_all", lower_once)
        patch.setattr(lower_all, "lower_state_graph", lower_state_once)
        patch.setattr(lower_all, "trace_first", trace_once)
        yield


@pytest.fixture(scope="session")
def hlo_artifact(
    sharp_checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Artifacts of the hlo target by architecture, the Llama's with a certificate; not to be changed."""

    @functools.cache
    def export(name: str) -> Path:
        folder = tmp_path_factory.mktemp("hlo") / name
        return export_tiny(sharp_checkpoints[name], folder, target="hlo", certificate=name == "llama")

    return export


@pytest.fixture(scope="session")
def recurrent_artifact(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Artifacts of the hlo target by kind of state, with snapshots and a certificate, for which an export executes all graphs beside the
    eager step; not to be changed."""

    @functools.cache
    def export(kind: str) -> Path:
        folder = tmp_path_factory.mktemp("recurrent")
        recurrent.model(kind).save_pretrained(folder / "checkpoint")
        sizes = {"target": "hlo", "state_snapshots": 3}
        return export_tiny(folder / "checkpoint", folder / "out", certificate=True, **sizes)

    return export
