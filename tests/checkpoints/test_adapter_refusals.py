# SPDX-License-Identifier: Apache-2.0
"""Adapters that cannot be merged, do not fit or are broken: one sentence, before anything is written."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from adapting import change_config, export, lora, make_adapter
from helpers import tiny_config
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from optimum_neuron import export_model


@pytest.fixture
def adapter(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    return make_adapter(tiny_checkpoint, tmp_path / "adapter", lora())


def refused(error: type[Exception], words: str, checkpoint: Path, output: Path, adapter: Any) -> None:
    with pytest.raises(error, match=words) as caught:
        export(checkpoint, output, adapter)
    assert "\n" not in str(caught.value)
    assert not output.exists()


@pytest.mark.parametrize(
    "config",
    [
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    ],
    ids=lambda config: config.peft_type.value,
)
def test_adapters_that_change_no_weights_are_refused_by_name(
    config: peft.PeftConfig, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    words = rf"adapter .* \({config.peft_type.value}\) adds to the context instead of changing weights"
    refused(ValueError, words, tiny_checkpoint, tmp_path / "artifact", tmp_path / "adapter")


def test_an_adapter_that_weights_cannot_express_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    config = lora(task_type="CAUSAL_LM", alora_invocation_tokens=[150, 151])
    adapter = make_adapter(tiny_checkpoint, tmp_path / "adapter", config)
    refused(ValueError, r"\(LORA\) cannot be merged: ", tiny_checkpoint, tmp_path / "artifact", adapter)


def test_an_adapter_of_another_model_is_refused(
    tiny_checkpoint: Path, adapter: Path, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    del model.model.layers[1:]
    model.config.num_hidden_layers = 1
    model.config.layer_types = None
    model.save_pretrained(tmp_path / "shorter")
    words = r"does not fit LlamaForCausalLM, which has no place for .*layers\.1\..* of its 16 tensors\)"
    refused(ValueError, words, tmp_path / "shorter", tmp_path / "artifact", adapter)
    wider = make_adapter(tiny_checkpoint, tmp_path / "wider", lora(target_modules=["gate_proj"]))
    refused(ValueError, r"does not fit", tiny_checkpoints["gpt_oss"], tmp_path / "artifact", wider)


def test_an_adapter_of_another_shape_is_refused(tiny_checkpoint: Path, adapter: Path, tmp_path: Path) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    name = next(name for name in tensors if "q_proj.lora_A" in name)
    save_file(tensors | {name: torch.zeros(4, 32)}, adapter / "adapter_model.safetensors")
    refused(
        ValueError, r"does not fit LlamaForCausalLM: .*size mismatch", tiny_checkpoint, tmp_path / "artifact", adapter
    )


def test_an_incomplete_adapter_is_refused(tiny_checkpoint: Path, adapter: Path, tmp_path: Path) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    name = next(name for name in tensors if "o_proj.lora_B" in name)
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, adapter / "adapter_model.safetensors")
    refused(ValueError, rf"lacks {name} \(1 tensors\)", tiny_checkpoint, tmp_path / "artifact", adapter)


def test_new_embeddings_without_a_head_are_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    config = lora(modules_to_save=["embed_tokens"])
    adapter = make_adapter(tiny_checkpoint, tmp_path / "adapter", config, rows=310)
    tensors = load_file(adapter / "adapter_model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "lm_head" not in name}
    save_file(kept, adapter / "adapter_model.safetensors")
    words = (
        r"changes the number of embeddings to 310 and holds no head of this size; save it with save_embedding_layers"
    )
    refused(ValueError, words, tiny_checkpoint, tmp_path / "artifact", adapter)


def broken_adapter(kind: str, adapter: Path) -> Path | str:
    weights = adapter / "adapter_model.safetensors"
    if kind == "pickled":
        torch.save(load_file(weights), adapter / "adapter_model.bin")
    if kind in ("pickled", "no weights"):
        weights.unlink()
    if kind == "truncated":
        weights.write_bytes(weights.read_bytes()[:-8])
    if kind == "no config":
        (adapter / "adapter_config.json").unlink()
    if kind == "corrupt config":
        (adapter / "adapter_config.json").write_text("{", encoding="utf-8")
    if kind == "unknown kind":
        change_config(adapter, peft_type="NONESUCH")
    return "./no/such/adapter" if kind == "nothing" else adapter


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("nothing", FileNotFoundError, r"\./no/such/adapter is neither a local path nor a Hub repository"),
        ("pickled", ValueError, r"holds its weights as adapter_model.bin, a format that may run code; save it again"),
        ("no weights", FileNotFoundError, r"adapter .* holds no adapter_model.safetensors"),
        ("truncated", ValueError, r"adapter_model.safetensors is truncated or corrupt \([\d,]+ bytes: "),
        ("no config", FileNotFoundError, r"holds no adapter_config.json; name the folder or Hub id of a PEFT adapter"),
        ("corrupt config", ValueError, r"adapter_config.json is not valid JSON \(.*\); download or copy it again"),
        ("unknown kind", ValueError, r"adapter_config.json is no configuration .*NONESUCH.*; save the adapter again"),
    ],
)
def test_a_broken_adapter_is_refused_with_the_reason(
    kind: str, error: type[Exception], words: str, tiny_checkpoint: Path, adapter: Path, tmp_path: Path
) -> None:
    refused(error, words, tiny_checkpoint, tmp_path / "artifact", broken_adapter(kind, adapter))


def test_without_peft_an_adapter_is_refused_and_all_else_works(
    tiny_checkpoint: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    words = r"merging an adapter needs PEFT, which is not installed; pip install 'optimum-neuron-runtime\[peft\]'"
    refused(RuntimeError, words, tiny_checkpoint, tmp_path / "artifact", adapter)
    export_model(tiny_checkpoint, tmp_path / "artifact", config=tiny_config())


def test_an_adapter_as_the_model_is_refused_and_its_base_named(
    tiny_checkpoint: Path, adapter: Path, tmp_path: Path
) -> None:
    words = rf"{adapter} is a PEFT adapter, not a checkpoint; .*: optimum-cli .* --model {tiny_checkpoint} --adapter {adapter}$"
    refused(ValueError, words, adapter, tmp_path / "artifact", None)


def test_an_adapter_among_the_checkpoint_s_files_is_not_merged_silently(
    tiny_checkpoint: Path, adapter: Path, tmp_path: Path
) -> None:
    both = tmp_path / "both"
    shutil.copytree(tiny_checkpoint, both)
    shutil.copytree(adapter, both, dirs_exist_ok=True)
    words = r"both holds a checkpoint and a PEFT adapter; move the adapter's files to another folder"
    refused(ValueError, words, both, tmp_path / "artifact", None)
