# SPDX-License-Identifier: Apache-2.0
"""When a vLLM process is ours, what is imported to decide it, and models that only this plugin lets vLLM serve."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import compressing
import pytest
import recurrent
import torch
import vllm.platforms
from helpers import python_process
from llm_answers import ask, greedy, random_prompt
from transformers import AutoModelForCausalLM, BioGptConfig, DeepseekV4Config, PreTrainedConfig
from vllm import LLM, ModelRegistry
from vllm.config import ModelConfig
from vllm.model_executor.models.registry import _LazyRegisteredModel

from optimum_neuron import NeuronConfig, export_model
from optimum_neuron.targets.neuron.sdk import devices as sdk_devices
from optimum_neuron.vllm import PLATFORM_GROUP, PLUGIN_NAME, general_plugin, is_wanted
from optimum_neuron.vllm.patches import NeuronCausalLM


SERVE = ["vllm", "serve"]


@pytest.fixture
def folders(export_text: Callable[..., Path], text_checkpoint: Path, tmp_path: Path) -> dict[str, str]:
    """What a command line may name: an artifact, a checkpoint, a folder with a manifest of another format, or none."""
    contents = {"other": '{"format": "other"}', "broken": "{"}
    for name, content in contents.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "neuron_config.json").write_text(content, encoding="utf-8")
    names = {name: str(tmp_path / name) for name in (*contents, "missing")}
    return {"artifact": str(export_text()), "checkpoint": str(text_checkpoint), **names}


@pytest.mark.parametrize(
    ("arguments", "environ", "devices", "builtin", "other", "wanted"),
    [
        # vLLM can use nothing here, or there are Neuron devices
        ([], {}, False, False, False, True),
        ([], {}, False, True, False, False),
        ([], {}, True, True, False, True),
        (["{checkpoint}"], {}, False, True, False, False),
        # the command line names an artifact
        (["{artifact}"], {}, False, True, False, True),
        (["--model={artifact}"], {}, False, True, False, True),
        (["{other}"], {}, False, True, False, False),
        (["{broken}"], {}, False, True, False, False),
        (["--model={missing}"], {}, False, True, False, False),
        # another platform plugin is installed
        ([], {}, False, False, True, False),
        ([], {}, True, False, True, False),
        (["{artifact}"], {}, False, False, True, True),
        # the user says so
        ([], {"VLLM_PLUGINS": "a, optimum_neuron ,b"}, False, True, True, True),
        ([], {"VLLM_PLUGINS": "optimum_neuron_other"}, False, True, False, False),
        ([], {"VLLM_PLUGINS": "another"}, False, False, False, True),
        (["{artifact}"], {"VLLM_TARGET_DEVICE": "cpu"}, True, False, False, False),
        ([], {"VLLM_TARGET_DEVICE": "empty"}, False, False, False, True),
        ([], {"VLLM_TARGET_DEVICE": "neuron"}, True, True, False, True),
        ([], {"VLLM_TARGET_DEVICE": "cpu", "VLLM_PLUGINS": "optimum_neuron"}, False, False, False, True),
    ],
)
def test_whose_a_process_is(
    folders: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    environ: dict[str, str],
    devices: bool,
    builtin: bool,
    other: bool,
    wanted: bool,
) -> None:
    monkeypatch.setattr(sdk_devices, "find_devices", lambda: object() if devices else None)
    plugins = {"nothing": lambda: None, "cuda": lambda: "some.Platform" if builtin else None}
    monkeypatch.setattr(vllm.platforms, "builtin_platform_plugins", plugins)
    if other:
        metadata = tmp_path / "installed" / "vllm_other-1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-other\nVersion: 1.0\n", encoding="utf-8")
        entry = f"[{PLATFORM_GROUP}]\nother = vllm_other:register\n"
        (metadata / "entry_points.txt").write_text(entry, encoding="utf-8")
        monkeypatch.syspath_prepend(metadata.parent)
    monkeypatch.setattr("sys.argv", [*SERVE, *(argument.format(**folders) for argument in arguments)])
    for name in ("VLLM_PLUGINS", "VLLM_TARGET_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert is_wanted() is wanted


def test_the_plugins_module_imports_neither_torch_nor_vllm() -> None:
    heavy = "{'torch', 'vllm', 'transformers', 'numpy'}"
    process = python_process(f"import sys, optimum_neuron.vllm; print(sorted({heavy} & set(sys.modules)))")
    output, errors = process.communicate(timeout=120)
    assert output.strip() == "[]", errors


def test_vllm_finds_our_platform_by_its_entry_point() -> None:
    assert vllm.platforms.current_platform.device_name == PLUGIN_NAME
    assert type(vllm.platforms.current_platform).__module__ == "optimum_neuron.vllm.platform"


def test_causal_language_models_are_ours_where_the_platform_is_and_vllm_keeps_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = {
        name: _LazyRegisteredModel(f"vllm.model_executor.models.{module}", name)
        for name, module in (("LlamaForCausalLM", "llama"), ("BertModel", "bert"))
    }
    monkeypatch.setattr(ModelRegistry, "models", dict(before))
    general_plugin()
    after = ModelRegistry.models
    assert after.pop("BertModel") is before["BertModel"]
    assert {"LlamaForCausalLM", "BioGptForCausalLM", "Qwen3_5ForCausalLM"} <= after.keys()
    assert all(isinstance(model, _LazyRegisteredModel) for model in after.values())
    assert {(model.module_name, model.class_name) for model in after.values()} == {
        (NeuronCausalLM.__module__, "NeuronCausalLM")
    }
    monkeypatch.setattr(ModelRegistry, "models", {})
    monkeypatch.setattr(vllm.platforms, "current_platform", types.SimpleNamespace(device_name="cuda"))
    general_plugin()
    assert not ModelRegistry.models


@pytest.mark.parametrize(
    ("architecture", "make"),
    [
        ("DeepseekV4ForCausalLM", lambda: DeepseekV4Config(**copy.deepcopy(compressing.OPTIONS))),
        ("KimiLinearForCausalLM", recurrent.CONFIGS["by channel"]),
    ],
)
def test_configs_for_which_vllm_has_classes_are_read_as_transformers_does(
    tmp_path: Path, architecture: str, make: Callable[[], PreTrainedConfig]
) -> None:
    config = make()
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    general_plugin()
    read = ModelConfig(str(tmp_path), skip_tokenizer_init=True)
    assert type(read.hf_config) is type(config) and read.max_model_len == config.max_position_embeddings
    ignored = {"dtype": None, "_name_or_path": None, "transformers_version": None}
    assert read.hf_config.to_dict() | ignored == config.to_dict() | ignored


def test_a_model_that_vllm_has_no_code_for_is_served(tmp_path: Path, open_llm: Callable[..., LLM]) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = BioGptConfig(vocab_size=300, max_position_embeddings=256, **sizes)
    torch.manual_seed(2)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path / "checkpoint")
    compiled = NeuronConfig(batch_size=2, sequence_length=128, prefill_chunk_size=16, dtype="float32", target="eager")
    artifact = export_model(tmp_path / "checkpoint", tmp_path / "artifact", config=compiled)
    llm = open_llm(artifact, skip_tokenizer_init=True)
    prompts = [random_prompt(length, vocab=300) for length in (3, 40, 17)]
    assert ask(llm, prompts, 8) == [greedy(model, prompt, 8) for prompt in prompts]
