# SPDX-License-Identifier: Apache-2.0
"""PEFT adapters merged at export: the artifact computes what the model with its adapter does, or the export is refused."""

from __future__ import annotations

import copy
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from adapting import ATTENTION, export, lora, make_adapter
from helpers import artifact_runner, generate, random_tokens, tiny_config
from hub_server import put_in_hub_cache
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from optimum_neuron import export_model
from optimum_neuron.artifact.artifact import Artifact
from optimum_neuron.artifact.filesystem import file_sha256


# How much farther from float64 than the model's own float32 logits an artifact's may be, whose sums are others.
NOISE_FACTOR = 2.0
NEW_TOKENS = 6
CONFIGS: dict[str, Callable[[], peft.PeftConfig]] = {
    "lora": lambda: peft.LoraConfig(r=4, lora_alpha=16, target_modules=ATTENTION, init_lora_weights=False),
    "rslora with a bias": lambda: peft.LoraConfig(r=4, use_rslora=True, bias="lora_only", target_modules="all-linear"),
    "dora": lambda: peft.LoraConfig(r=4, use_dora=True, target_modules=["v_proj", "down_proj"]),
    "adalora": lambda: peft.AdaLoraConfig(init_r=4, target_r=2, total_step=10, target_modules=ATTENTION),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "lokr": lambda: peft.LoKrConfig(r=4, alpha=8, target_modules=ATTENTION),
    "oft": lambda: peft.OFTConfig(oft_block_size=8, target_modules=ATTENTION),
    "head and norms": lambda: peft.LoraConfig(r=4, target_modules=ATTENTION, modules_to_save=["lm_head", "norm"]),
    "embeddings": lambda: peft.LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"]),
    "tokens": lambda: peft.LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[5, 6, 7]),
    "experts": lambda: lora(target_modules=[], target_parameters=["experts.gate_up_proj", "experts.down_proj"]),
}
MERGED = [("llama", kind) for kind in CONFIGS if kind != "experts"]
MERGED += [("gemma2", "lora"), ("gemma2", "tokens"), ("gpt_oss", "experts")]


def reference(checkpoint: Path, *adapters: Path, rows: int | None = None) -> Any:
    """transformers' model with PEFT's adapter beside the weights; all but the last are merged into them."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    if rows is not None:
        model.resize_token_embeddings(rows, mean_resizing=False)
    for adapter in adapters[:-1]:
        model = peft.PeftModel.from_pretrained(model, adapter).merge_and_unload()
    return peft.PeftModel.from_pretrained(model, adapters[-1]).eval()


def assert_same(artifact: Path, model: Any, prompt_length: int = 21) -> None:
    """The artifact's tokens are the model's, and its logits differ by rounding alone."""
    prompt = random_tokens(prompt_length)
    tokens, logits = generate(artifact_runner(artifact), prompt, NEW_TOKENS)
    ids = torch.tensor([[*prompt.tolist(), *tokens]])
    with torch.inference_mode():
        expected = model(input_ids=ids, use_cache=False).logits[0, prompt_length - 1 : -1]
        exact = copy.deepcopy(model).double()(input_ids=ids, use_cache=False).logits[0, prompt_length - 1 : -1]
    assert tokens == expected.argmax(-1).tolist()
    assert (logits - exact).abs().max() <= NOISE_FACTOR * (expected - exact).abs().max()


@pytest.mark.parametrize(("architecture", "kind"), MERGED)
def test_a_merged_adapter_computes_what_it_computed_beside_the_weights(
    architecture: str, kind: str, sharp_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint = sharp_checkpoints[architecture]
    adapter = make_adapter(checkpoint, tmp_path / "adapter", CONFIGS[kind]())
    artifact = export(checkpoint, tmp_path / "artifact", adapter)
    assert_same(artifact, reference(checkpoint, adapter))


@pytest.fixture
def adapter(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    return make_adapter(tiny_checkpoint, tmp_path / "adapter", lora())


def test_adapters_are_merged_in_turn(sharp_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    checkpoint = sharp_checkpoints["llama"]
    first = make_adapter(checkpoint, tmp_path / "first", CONFIGS["dora"]())
    second = make_adapter(checkpoint, tmp_path / "second", CONFIGS["ia3"]())
    artifact = export(checkpoint, tmp_path / "artifact", [first, second])
    assert_same(artifact, reference(checkpoint, first, second))
    assert [entry["peft_type"] for entry in Artifact.open(artifact).manifest["adapters"]] == ["LORA", "IA3"]


def test_the_manifest_names_the_adapter_and_its_checkpoint_keeps_its_tokenizer(
    tiny_checkpoint: Path, adapter: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    artifact = Artifact.open(export(tiny_checkpoint, tmp_path / "artifact", str(adapter)))
    digests = {name: file_sha256(adapter / name) for name in ("adapter_config.json", "adapter_model.safetensors")}
    assert artifact.manifest["adapters"] == [{"source": str(adapter), "peft_type": "LORA", "sha256": digests}]
    assert not (artifact.path / "adapter_config.json").exists() and "was trained on" not in caplog.text
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (artifact.path / name).read_bytes() == (tiny_checkpoint / name).read_bytes()
    plain = Artifact.open(export_model(tiny_checkpoint, tmp_path / "plain", config=tiny_config()))
    assert plain.manifest["adapters"] == []
    path = adapter / "adapter_config.json"
    named = json.loads(path.read_text(encoding="utf-8")) | {"base_model_name_or_path": "someone/another-7b"}
    path.write_text(json.dumps(named), encoding="utf-8")
    export(tiny_checkpoint, tmp_path / "other", adapter)
    assert f"was trained on someone/another-7b, and is merged into {tiny_checkpoint}" in caplog.text


def test_weights_are_merged_in_float32_and_rounded_once(tiny_checkpoint: Path, adapter: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "bfloat16"
    AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.bfloat16).save_pretrained(checkpoint)
    merged = reference(checkpoint, adapter).merge_and_unload().state_dict()
    for dtype in ("auto", "bfloat16", "float16"):
        artifact = Artifact.open(export(checkpoint, tmp_path / "artifacts" / dtype, adapter, dtype=dtype))
        rounded = getattr(torch, artifact.config.dtype)
        assert artifact.config.dtype == ("bfloat16" if dtype == "auto" else dtype)
        weights = load_file(artifact.path / "weights" / "model.safetensors")
        for name, tensor in merged.items():
            assert torch.equal(weights[f"model.{name}"], tensor.to(rounded)), name
        assert weights["model.model.rotary_emb.inv_freq"].dtype == torch.float32


def test_merging_into_one_of_two_tied_weights_unties_them(sharp_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    checkpoint = sharp_checkpoints["gemma2"]
    assert AutoConfig.from_pretrained(checkpoint).tie_word_embeddings
    tied = make_adapter(checkpoint, tmp_path / "tied", lora())
    untied = make_adapter(checkpoint, tmp_path / "untied", CONFIGS["embeddings"]())
    for adapter, is_tied in ((tied, True), (untied, False)):
        artifact = Artifact.open(export(checkpoint, tmp_path / f"{adapter.name}.artifact", adapter))
        assert AutoConfig.from_pretrained(artifact.path).tie_word_embeddings is is_tied
        assert ("model.lm_head.weight" in {*artifact.tied_weights, *artifact.tied_weights.values()}) is is_tied


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_new_tokens_bring_a_tokenizer(architecture: str, sharp_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    checkpoint = sharp_checkpoints[architecture]
    config = lora(modules_to_save=["embed_tokens", "lm_head"])
    adapter = make_adapter(checkpoint, tmp_path / "adapter", config, rows=310)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(adapter)
    artifact = export(checkpoint, tmp_path / "artifact", adapter)
    assert_same(artifact, reference(checkpoint, adapter, rows=310))
    assert Artifact.open(artifact).model.vocab_size == AutoConfig.from_pretrained(artifact).vocab_size == 310
    assert AutoTokenizer.from_pretrained(artifact).convert_tokens_to_ids("<new>") == len(tokenizer) - 1


def test_an_adapter_of_the_hub_is_found_in_its_cache(tiny_checkpoint: Path, adapter: Path, tmp_path: Path) -> None:
    put_in_hub_cache(adapter, "someone/adapter", tmp_path / "hub")
    options: dict[str, Any] = {"config": tiny_config(), "cache_dir": tmp_path / "hub"}
    artifact = export_model(tiny_checkpoint, tmp_path / "artifact", adapter="someone/adapter", **options)
    assert Artifact.open(artifact).manifest["adapters"][0]["source"] == "someone/adapter"
    with pytest.raises(FileNotFoundError, match=r"someone/missing is no local path, the Hub cache \S+ does not have"):
        export_model(tiny_checkpoint, tmp_path / "other", adapter="someone/missing", **options)


def refused(error: type[Exception], words: str, checkpoint: Path, output: Path, adapter: Any) -> None:
    with pytest.raises(error, match=words) as caught:
        export(checkpoint, output, adapter)
    assert "\n" not in str(caught.value)
    assert not output.exists()


def test_adapters_that_change_no_weights_or_that_weights_cannot_express_are_refused(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    make_adapter(tiny_checkpoint, tmp_path / "adapter", config)
    words = rf"adapter .* \({config.peft_type.value}\) adds to the context instead of changing weights"
    refused(ValueError, words, tiny_checkpoint, tmp_path / "artifact", tmp_path / "adapter")
    config = lora(task_type="CAUSAL_LM", alora_invocation_tokens=[150, 151])
    adapter = make_adapter(tiny_checkpoint, tmp_path / "activated", config)
    refused(ValueError, r"\(LORA\) cannot be merged: ", tiny_checkpoint, tmp_path / "artifact", adapter)
    both = Path(shutil.copytree(tiny_checkpoint, tmp_path / "both"))
    shutil.copytree(adapter, both, dirs_exist_ok=True)
    words = r"both holds a checkpoint and a PEFT adapter; move the adapter's files to another folder"
    refused(ValueError, words, both, tmp_path / "artifact", None)


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


def test_an_adapter_that_does_not_fit_is_refused(tiny_checkpoint: Path, adapter: Path, tmp_path: Path) -> None:
    path, words = adapter / "adapter_model.safetensors", r"does not fit LlamaForCausalLM: .*size mismatch"
    tensors = load_file(path)
    name = next(name for name in tensors if "q_proj.lora_A" in name)
    save_file(tensors | {name: torch.zeros(4, 32)}, path)
    refused(ValueError, words, tiny_checkpoint, tmp_path / "artifact", adapter)
    del tensors[name]
    save_file(tensors, path)
    refused(ValueError, rf"lacks {name} \(1 tensors\)", tiny_checkpoint, tmp_path / "artifact", adapter)
    make_adapter(tiny_checkpoint, adapter, lora(modules_to_save=["embed_tokens"]), rows=310)
    save_file({name: each for name, each in load_file(path).items() if "lm_head" not in name}, path)
    words = (
        "changes the number of embeddings to 310 and holds no head of this size; save it with save_embedding_layers"
    )
    refused(ValueError, words, tiny_checkpoint, tmp_path / "artifact", adapter)


def test_without_peft_an_adapter_is_refused_and_all_else_works(
    tiny_checkpoint: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    words = r"merging an adapter needs PEFT, which is not installed; pip install 'optimum-neuron-runtime\[peft\]'"
    refused(RuntimeError, words, tiny_checkpoint, tmp_path / "artifact", adapter)
    export_model(tiny_checkpoint, tmp_path / "artifact", config=tiny_config())
