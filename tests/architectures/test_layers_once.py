# SPDX-License-Identifier: Apache-2.0
"""Of every architecture, the plan of a graph of which a few layers were traced is that of a whole trace."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures.configs import ARCHITECTURES
from architectures.models import deepen, graph_model

from optimum_neuron.config import NeuronConfig
from optimum_neuron.kernels.lower.lower import lower
from optimum_neuron.parity.inspect import look_at
from optimum_neuron.step.attention.kv_cache import KVCache
from optimum_neuron.step.program import export_graph, export_layers_once
from optimum_neuron.step.spec import graph_specs
from optimum_neuron.step.state_specs import state_specs
from optimum_neuron.targets.cpu.ops import OPS


@pytest.fixture
def deeper(monkeypatch: pytest.MonkeyPatch) -> None:
    deepen(monkeypatch)


def _whole_and_other(name: str) -> tuple[Any, Callable[[], Any]]:
    """Plan and constants of a whole trace; and what makes those of one of a few layers."""
    model = graph_model(name, torch.bfloat16)
    config = NeuronConfig(batch_size=2, sequence_length=64, prefill_chunk_size=8, dtype="bfloat16", target="cpu")
    cache = KVCache(state_specs(config, look_at(model)))
    graph = next(graph for graph in graph_specs(config) if graph.kind == "mixed")
    whole = lower(export_graph(model, cache, graph, OPS))
    return whole, lambda: lower(export_layers_once(model, cache, graph, OPS))


def _check(one: Any, other: Any) -> None:
    (whole, constants), (found, own_constants) = one, other
    assert found == whole
    assert own_constants.keys() == constants.keys()
    assert all(torch.equal(own_constants[key], constants[key]) for key in constants)


@pytest.mark.parametrize("name", ["gpt_oss", "lfm2"])
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
