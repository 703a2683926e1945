# SPDX-License-Identifier: Apache-2.0
"""Of every architecture, the plan of a graph of which a few layers were traced is that of a whole trace."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable
from typing import Any

import configs
import pytest
import torch
from configs import ARCHITECTURES, LAYERS, OVERRIDES, SIZES, tiny_config
from transformers import AutoModelForCausalLM

from optimum_neuron.config import NeuronConfig
from optimum_neuron.graphs.checks.inspect import look_at
from optimum_neuron.graphs.checks.rope_length import keep_frequencies
from optimum_neuron.graphs.interface import ATTENTION_NAME, with_attention
from optimum_neuron.graphs.kv_cache import KVCache
from optimum_neuron.graphs.program import export_graph, export_layers_once
from optimum_neuron.graphs.spec import graph_specs, state_specs
from optimum_neuron.targets.cpu.operators import OPS
from optimum_neuron.targets.cpu.plan.lower import lower


# Layers that are all the same, of two kinds in turn, with experts, with convolutions, and different at the beginning.
NEEDED = ("llama", "gemma3_text", "gpt_oss", "lfm2", "deepseek_v3")


@pytest.fixture
def deeper(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many layers that of two kinds in turn some are left out."""
    monkeypatch.setattr(configs, "LAYERS", 2 * LAYERS)
    for key, value in SIZES.items():
        if value == LAYERS and ("layer" in key or key == "num_blocks"):
            monkeypatch.setitem(SIZES, key, 2 * LAYERS)
    for name, options in OVERRIDES.items():
        if "layer_types" in options:
            monkeypatch.setitem(OVERRIDES, name, options | {"layer_types": options["layer_types"] * 2})


def _model(name: str) -> Any:
    config = tiny_config(name)
    torch.manual_seed(0)
    model = with_attention(
        lambda attention: AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=torch.bfloat16, attn_implementation=attention
        ),
        ATTENTION_NAME,
    )
    keep_frequencies(model)
    return model.eval().requires_grad_(False)


def _whole_and_other(name: str) -> tuple[Any, Callable[[], Any]]:
    """Plan and constants of a whole trace; and what makes those of one of a few layers."""
    model = _model(name)
    config = NeuronConfig(batch_size=2, sequence_length=64, prefill_chunk_size=8, dtype="bfloat16", target="cpu")
    cache = KVCache(state_specs(config, look_at(model)))
    graph = next(graph for graph in graph_specs(config) if graph.kind == "mixed")
    whole = lower(export_graph(model, cache, graph, OPS))
    return whole, lambda: lower(export_layers_once(model, cache, graph, OPS))


def _check(one: Any, other: Any) -> None:
    (whole, constants), (found, own_constants) = one, other
    assert found.to_dict() == whole.to_dict()
    assert own_constants.keys() == constants.keys()
    assert all(torch.equal(own_constants[key], constants[key]) for key in constants)


@pytest.mark.parametrize("name", NEEDED)
def test_the_plan_is_that_of_a_whole_trace(name: str, deeper: None) -> None:
    whole, other = _whole_and_other(name)
    _check(whole, other())


@pytest.mark.full
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_plan_of_any_architecture_is_that_of_a_whole_trace(name: str, deeper: None) -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            whole, other = _whole_and_other(name)
        except Exception as error:  # of a model that has no plan at all, or cannot be made here
            pytest.skip(f"{type(error).__name__}: {error}")
        _check(whole, other())
