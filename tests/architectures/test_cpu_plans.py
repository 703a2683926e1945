# SPDX-License-Identifier: Apache-2.0
"""Every architecture as plans for the CPU: they compute what eager steps do, and a trace of a few layers gives the plan of a whole one."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from architectures.configs import ARCHITECTURES
from architectures.models import deepen, graph_model
from helpers import artifact_runner, export_tiny
from parity import PROMPT, make_checkpoint, run, tokens
from table import TABLE, rows_of

from optimum_neuron.config import NeuronConfig
from optimum_neuron.errors import UnsupportedModelError
from optimum_neuron.kernels.lower.lower import lower
from optimum_neuron.kernels.run.memory import PlanMemory
from optimum_neuron.parity.inspect import look_at
from optimum_neuron.step.attention.kv_cache import KVCache
from optimum_neuron.step.program import export_graph, export_layers_once
from optimum_neuron.step.spec import graph_specs
from optimum_neuron.step.state_specs import state_specs
from optimum_neuron.targets.cpu.executable import LiveTokens
from optimum_neuron.targets.cpu.ops import OPS


# One of each mechanism that plans treat apart: values kept from load, experts with biases, latent attention, convolutions. Plain
# attention and recurrences have tests of their own.
NEEDED = ("gptj", "gpt_oss", "deepseek_v3", "lfm2")
# Here it is the whole model, of which an export takes the part for text.
WITH_IMAGES = ("gemma3",)
# Of the largest logit: kernels and torch add in different orders.
NOISE = 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in NEEDED else [pytest.mark.full]) for name in ARCHITECTURES]
)
def test_plans_compute_what_eager_steps_do(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        make_checkpoint(name, tmp_path / "checkpoint")
        sizes = {"sequence_length": 64, "ctx_batch_size": 1}
        eager = export_tiny(tmp_path / "checkpoint", tmp_path / "eager", target="eager", **sizes)
        cpu = export_tiny(tmp_path / "checkpoint", tmp_path / "cpu", target="cpu", **sizes)
    except (ImportError, AttributeError, ValueError) as error:
        assert name not in NEEDED, error  # tests of exactness say why others are refused
        return
    prompt, generated = tokens(PROMPT, seed=1), tokens(10, seed=2).tolist()
    expected, _ = run(artifact_runner(eager), prompt, generated)
    runner = artifact_runner(cpu)
    with monkeypatch.context() as patch:
        patch.setattr(LiveTokens, "__call__", lambda self, inputs: 1 << 40)
        whole, chosen = run(runner, prompt, generated)
    for place, logits in whole.items():
        assert (logits - expected[place]).abs().max() <= NOISE * expected[place].abs().max()
    # NaN in all memory before each run, which as integers are no indices: what was left out and is needed shows.
    start = PlanMemory.take_inputs

    def filled(memory: PlanMemory, inputs: Sequence[np.ndarray]) -> None:
        for place, buffer in enumerate(memory._buffers):
            if buffer.kind == "arena" and buffer.bytes:
                memory._memory[place].fill(0xFF)
        start(memory, inputs)

    monkeypatch.setattr(PlanMemory, "take_inputs", filled)
    found, again = run(runner, prompt, generated)
    assert again == chosen
    assert all(torch.equal(logits, whole[place]) for place, logits in found.items())


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in ("gpt_oss", "lfm2") else [pytest.mark.full]) for name in ARCHITECTURES],
)
def test_the_plan_is_that_of_a_whole_trace(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, reason = rows_of(TABLE.read_text(encoding="utf-8"))[name]
    if kind != "exact" or "target eager only" in reason or name in WITH_IMAGES:
        pytest.skip(f"it has no plan: {reason}")
    deepen(monkeypatch)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    config = NeuronConfig(batch_size=2, sequence_length=64, prefill_chunk_size=8, dtype="bfloat16", target="cpu")
    graph = next(graph for graph in graph_specs(config) if graph.kind == "mixed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = graph_model(name, torch.bfloat16)
            cache = KVCache(state_specs(config, look_at(model)))
            whole, constants = lower(export_graph(model, cache, graph, OPS))
        except (UnsupportedModelError, ImportError) as error:
            if name in ("gpt_oss", "lfm2"):
                raise
            pytest.skip(f"{type(error).__name__}: {error}")
        found, own_constants = lower(export_layers_once(model, cache, graph, OPS))
    assert found == whole
    assert own_constants.keys() == constants.keys()
    assert all(torch.equal(own_constants[key], constants[key]) for key in constants)
