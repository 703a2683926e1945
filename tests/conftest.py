# SPDX-License-Identifier: Apache-2.0
"""Fixtures of tests/: what takes long to make is made once, on first use, and shared by all files."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import Opener, artifact_runner, eager_runner, export_tiny, load_model, tiny_config
from torch import nn
from transformers import AutoModelForCausalLM

from optimum_neuron.parity.inspect import inspect_model
from optimum_neuron.runtime.runner import GraphRunner
from optimum_neuron.step.model_spec import ModelSpec


# It needs packages that contradict ours: `make test-vllm` has an environment of its own.
# Without vLLM, the folder tests/vllm is what "import vllm" finds, and has no location of its own.
_vllm = importlib.util.find_spec("vllm")
collect_ignore = [] if _vllm is not None and _vllm.has_location else ["vllm"]


@pytest.fixture(scope="session")
def sharp_checkpoints(tiny_checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small random weights attend to all tokens alike, and reach no soft cap: in these, attention decides."""
    folders = {}
    for name, folder in tiny_checkpoints.items():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for layer in model.model.layers:
            if not hasattr(layer, "self_attn"):
                for parameter in layer.conv.parameters():
                    parameter.data *= 20
                continue
            queries = layer.self_attn.q_b_proj if hasattr(layer.self_attn, "q_b_proj") else layer.self_attn.q_proj
            queries.weight.data *= 50
            if hasattr(layer.self_attn, "q_norm"):
                layer.self_attn.q_norm.weight.data *= 3
        if hasattr(model.config, "attn_logit_softcapping"):
            model.config.attn_logit_softcapping = 0.5
        folders[name] = tmp_path_factory.mktemp("sharp") / name
        shutil.copytree(folder, folders[name])
        model.save_pretrained(folders[name])
    return folders


@pytest.fixture(scope="session")
def tiny_models(sharp_checkpoints: dict[str, Path]) -> dict[str, nn.Module]:
    """With the cached attention, in float32; not to be changed."""
    return {name: load_model(folder) for name, folder in sharp_checkpoints.items()}


@pytest.fixture(scope="session")
def tiny_specs(tiny_models: dict[str, nn.Module]) -> dict[str, ModelSpec]:
    return {name: inspect_model(model) for name, model in tiny_models.items()}


@pytest.fixture(scope="session")
def cpu_artifact(
    sharp_checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Artifacts of the cpu target by architecture; not to be changed."""
    made: dict[str, Path] = {}

    def export(name: str) -> Path:
        if name not in made:
            made[name] = export_tiny(sharp_checkpoints[name], tmp_path_factory.mktemp("cpu") / name, target="cpu")
        return made[name]

    return export


@pytest.fixture(scope="session")
def open_runner(tiny_models: dict[str, nn.Module], cpu_artifact: Callable[[str], Path]) -> Opener:
    """Runners with free slots by architecture and target; options change the sizes, on the eager target only."""
    made: dict[tuple, GraphRunner] = {}

    def open_one(name: str, target: str = "eager", **changes: int | tuple[int, ...]) -> GraphRunner:
        key = (name, target, *sorted(changes.items()))
        if key not in made and target == "cpu":
            assert not changes
            made[key] = artifact_runner(cpu_artifact(name))
        elif key not in made:
            made[key] = eager_runner(tiny_models[name], tiny_config(**changes))
        made[key].reset_slots()
        return made[key]

    return open_one
