# SPDX-License-Identifier: Apache-2.0
"""HLO modules of graphs of which a few layers were traced are, byte for byte, those of whole traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures.models import KINDS_OF_LAYERS, deepen, graph_model
from helpers import tiny_config
from tiny import TINY_SIZES
from torch import Tensor
from torch.export import ExportedProgram
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from optimum_neuron.parity.inspect import look_at
from optimum_neuron.step.attention.kv_cache import KVCache
from optimum_neuron.step.interface import ATTENTION_NAME
from optimum_neuron.step.program import expand_layers, export_graph
from optimum_neuron.step.spec import graph_specs
from optimum_neuron.step.state_specs import state_specs
from optimum_neuron.step.step import StepModule, example_inputs
from optimum_neuron.step.tracing.alike import NotAlikeError
from optimum_neuron.step.tracing.repeated_layers import LayerTrace, few_layers
from optimum_neuron.targets.neuron.graphs.io import LoweredGraph
from optimum_neuron.targets.neuron.lowering import lower
from optimum_neuron.targets.neuron.lowering.decompositions import decompose
from optimum_neuron.targets.neuron.lowering.lower import lower_step
from optimum_neuron.targets.neuron.lowering.lower_all import rank_model
from optimum_neuron.targets.neuron.lowering.ops import NEURON_OPS


LAYERS = 5


def lower_whole(patch: pytest.MonkeyPatch, *args: Any) -> LoweredGraph:
    """As `lower_step`, all layers traced."""

    def whole(model: Any, cache: Any, spec: Any, ops: Any, scores: Any, decompose: Any) -> Any:
        return decompose(export_graph(model, cache, spec, ops, scores))

    with patch.context() as inner:
        inner.setattr(lower, "export_layers_once", whole)
        return lower_step(*args)


@pytest.mark.full
@pytest.mark.parametrize("name", KINDS_OF_LAYERS)
def test_the_module_is_that_of_a_whole_trace(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    deepen(monkeypatch)
    model = graph_model(name, torch.bfloat16)
    config = tiny_config(target="hlo", dtype="bfloat16")
    spec = look_at(model)
    graph = next(graph for graph in graph_specs(config) if graph.kind == "mixed")
    step = (model, KVCache(state_specs(config, spec)), graph, NEURON_OPS, spec.vocab_size)
    assert lower_step(*step) == lower_whole(monkeypatch, *step)


def test_layers_that_write_other_states_are_not_the_same() -> None:
    """The second that was traced, with the nodes of the first, keeps its keys where values belong."""
    config = tiny_config(target="hlo")
    llama = LlamaConfig(**TINY_SIZES | {"num_hidden_layers": 4})
    model = AutoModelForCausalLM.from_config(llama, attn_implementation=ATTENTION_NAME).eval()
    spec = look_at(model)
    module = StepModule(model, KVCache(state_specs(config, spec)), graph_specs(config)[0], NEURON_OPS, None).eval()

    def traced() -> tuple[ExportedProgram, LayerTrace]:
        with few_layers(model) as layers:
            program = torch.export.export(module, example_inputs(module.spec.inputs()), strict=False)
        return decompose(program), layers

    with torch.no_grad():
        expand_layers(*traced())
        program, layers = traced()
    specs = {each.target: each for each in program.graph_signature.output_specs}
    keys, values = (specs[f"kv_cache.{name}_2"] for name in ("key", "value"))
    keys.target, values.target = values.target, keys.target
    with pytest.raises(NotAlikeError):
        expand_layers(program, layers)


def test_of_a_ranks_layers_three_are_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    LlamaConfig(**TINY_SIZES | {"num_hidden_layers": LAYERS}).save_pretrained(tmp_path)
    config = tiny_config(target="hlo", tensor_parallel_size=2)
    rank = rank_model(tmp_path, config, {}, trust_remote_code=False)
    numbers = {layer.mlp: number for number, layer in enumerate(rank.model.model.layers)}
    own, ran = LlamaMLP.forward, []

    def noted(self: LlamaMLP, x: Tensor) -> Tensor:
        ran.append(numbers[self])
        return own(self, x * torch.tensor([1.5]))

    monkeypatch.setattr(LlamaMLP, "forward", noted)
    cache, graph = KVCache(state_specs(config, rank.spec)), graph_specs(config)[0]
    step = (rank.model, cache, graph, rank.ops, rank.vocab_size, 2, rank.columns)
    found = lower_step(*step)
    assert ran == [0, 1, 2]
    assert found == lower_whole(monkeypatch, *step)
