# SPDX-License-Identifier: Apache-2.0
"""GGUF files: their numbers and defaults are the artifact's; what is not known or wrong is refused by its name in a sentence."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from converted import convert
from gguf_files import write_gguf
from helpers import export_tiny, weights_of
from sharp import sharpen
from tiny import TINY_CONFIGS
from transformers import AutoModelForCausalLM, AutoTokenizer

from optimum_neuron.artifact.artifact import Artifact
from optimum_neuron.checkpoints.find import find_checkpoint
from optimum_neuron.checkpoints.gguf.architectures import ARCHITECTURES


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("F32", "auto"), ("F16", "bfloat16"), ("BF16", "auto"), ("Q8_0", "auto"), ("Q5_0", "bfloat16"), ("Q5_1", "auto")],
)
def test_blocks_become_the_numbers_that_they_are(dtype: str, kind: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    exact = write_gguf(tiny_checkpoint, tmp_path / "tiny.gguf", kind)
    plain = kind in ("F32", "F16", "BF16")
    artifact = export_tiny(tmp_path / "tiny.gguf", tmp_path / "artifact", dtype=dtype, dequantize=not plain)
    assert Artifact.open(artifact).config.dtype == ("float32" if dtype == "auto" else dtype)
    weights = weights_of(Artifact.open(artifact))
    for name, tensor in exact.items():
        assert torch.equal(weights[f"model.{name}"], tensor.to(weights[f"model.{name}"].dtype)), name
    document = json.loads((artifact / "config.json").read_text(encoding="utf-8"))
    assert document["architectures"] == ["LlamaForCausalLM"] and "quantization_config" not in document


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({"temp": 0.7, "top_k": 20, "top_p": 0.8}, {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8}),
        ({"penalty_repeat": 1.25}, {"repetition_penalty": 1.25}),
        ({"temp": 0.0, "top_k": 20}, {}),
    ],
)
def test_the_file_s_defaults_of_generation_are_the_artifact_s(
    named: dict[str, float], expected: dict[str, Any], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    write_gguf(tiny_checkpoint, tmp_path / "tiny.gguf", "F16", sampling=named)
    artifact = export_tiny(tmp_path / "tiny.gguf", tmp_path / "artifact", output_logits=False)
    document = json.loads((artifact / "generation_config.json").read_text(encoding="utf-8"))
    names = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty")
    assert {name: document[name] for name in names if name in document} == pytest.approx(expected)
    assert Artifact.open(artifact).config.output_logits == ("repetition_penalty" in expected)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    model = AutoModelForCausalLM.from_config(TINY_CONFIGS["llama"]())
    sharpen(model)
    model.save_pretrained(folder)
    return folder


def refusal(path: Path) -> str:
    with pytest.raises(ValueError, match=r"model\.gguf") as caught:
        find_checkpoint(path, revision=None, token=None, trust_remote_code=False).load_model("auto")
    told = str(caught.value)
    assert "\n" not in told and len(told) < 600
    return told


def keys(values: dict[str, Any]) -> Callable[[Any], None]:
    """Has a file have keys of the types that Python's values have; of arrays, of their first items."""
    kinds = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}

    def add(writer: Any) -> None:
        for name, value in values.items():
            getattr(writer, f"add_{kinds[type(value)]}")(name, value)

    return add


NOT_KNOWN = "and it is not known what a llama model"
NUMBER, WHOLE = "which is not a finite number", "which is not a whole number"
REFUSED: list[tuple[str, Any, str]] = [
    ("llama.attention.scale", 0.5, NOT_KNOWN), ("qwen2.block_count", 2, NOT_KNOWN),
    ("adapter.lora.alpha", 16.0, NOT_KNOWN),
    ("llama.attention.causal", False, "a token of this model attends to later ones"),
    ("llama.nextn_predict_layers", 1, "so many of its last blocks are layers like"),
    ("general.type", "adapter", "the file holds no model"), ("split.count", 3, "the file is one of several parts"),
    ("llama.rope.freq_base", float("nan"), NUMBER), ("llama.rope.freq_base", "10000", NUMBER),
    ("llama.attention.layer_norm_rms_epsilon", float("inf"), NUMBER), ("llama.feed_forward_length", [96, 96], WHOLE),
    ("llama.context_length", True, WHOLE), ("llama.attention.head_count", 4.0, WHOLE),
    ("llama.attention.head_count_kv", [2, 1], "the layers of this model differ"),
    ("llama.attention.head_count_kv", ["a", "b"], "which is not a whole number or 2 of them"),
    ("llama.attention.value_length", 24, "transformers has values as wide as keys, 16"),
    ("llama.vocab_size", 299, "token_embd.weight has 300 rows"),
    ("llama.rope.dimension_count", 8, "heads of 16 dimensions are rotated as a whole"),
    ("llama.rope.scaling.type", "dynamic", "and rope.scaling.factor=0.0"),
    ("llama.rope.scaling.type", 2, "which is not a text"),
    ("llama.rope.scaling.attn_factor", 0.5, "it is known of files with"),
    ("tokenizer.ggml.eos_token_id", 300, "the model has 300 tokens"),
    ("general.architecture", "rwkv6", "GGUF files are read only with bloom, deepseek2"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "told"), REFUSED, ids=[f"{name}-{value}"[:60] for name, value, _ in REFUSED]
)
def test_an_unknown_or_wrong_key_is_refused(name: str, value: Any, told: str, llama: Path, tmp_path: Path) -> None:
    found = refusal(convert(llama, tmp_path / "model.gguf", 300, keys({name: value})))
    assert told in found and name.rpartition(".")[2] in found


HARMLESS = {
    "llama.rope.scaling.finetuned": True, "llama.rope.scaling.type": "none", "llama.rope.scaling.attn_factor": 1.0,
    "llama.attention.causal": True, "tokenizer.ggml.add_space_prefix": False, "quantize.imatrix.entries_count": 7,
    "mradermacher.quantized_by": "x", "split.count": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "values", "told"),
    [
        ("blk.0.attn_gate.weight", [1.0], "holds blk.0.attn_gate.weight, for which LlamaForCausalLM has no place"),
        ("blk.2.attn_norm.weight", [1.0] * 64, "holds blk.2.attn_norm.weight, for which"),
        ("blk.0.attn_q.bias", [0.0] * 64, "lacks the tensor blk.0.attn_k.bias, which LlamaForCausalLM needs"),
        ("rope_freqs.weight", [1.0] * 7, "rope_freqs.weight of the shape [7] holds no 8 positive numbers"),
        ("rope_freqs.weight", [1.0] * 7 + [float("nan")], "rope_freqs.weight of the shape [8] holds no 8 positive"),
        ("rope_factors_long.weight", [1.0] * 8, "lacks the tensor rope_factors_short.weight"),
    ],
)
def test_a_tensor_that_the_model_lacks_or_that_is_wrong_is_refused_by_name(
    name: str, values: list[float], told: str, llama: Path, tmp_path: Path
) -> None:
    data = np.array(values, np.float32)
    assert told in refusal(convert(llama, tmp_path / "model.gguf", 300, lambda writer: writer.add_tensor(name, data)))


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight", "lacks the tensor blk.1.ffn_up.weight, which LlamaForCausalLM"),
        (b"llama.attention.key_length", b"llama.attention.head_count", "it has llama.attention.head_count twice"),
        (b"blk.1.ffn_up.weight", b"blk.0.ffn_up.weight", "it has blk.0.ffn_up.weight twice"),
        (b"llama.block_count", b"llama.block_coumt", "lacks llama.block_count, without which its model is not known"),
        (b"token_embd.weight", b"token_embx.weight", "lacks the tensor token_embd.weight"),
    ],
)  # fmt: skip
def test_a_name_twice_or_missing_is_told(old: bytes, new: bytes, told: str, llama: Path, tmp_path: Path) -> None:
    path = convert(llama, tmp_path / "model.gguf", 300)
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    assert told in refusal(path)


def test_a_tensor_of_other_sizes_than_the_keys_name_is_refused(llama: Path, tmp_path: Path) -> None:
    told = refusal(convert(llama, tmp_path / "model.gguf", 300, keys({"llama.feed_forward_length": 80})))
    assert "blk.0.ffn_gate.weight of the shape [96, 64]" in told and "gate_proj.weight of the shape [80, 64]" in told


def test_the_page_about_exports_names_the_architectures_that_are_read() -> None:
    page = (Path(__file__).parents[2] / "docs" / "export.md").read_text(encoding="utf-8")
    listed = page.partition("It reads files of the architectures ")[2].partition(".\n")[0]
    names = re.sub(r" \([^)]*\)", "", listed).replace("\n", " ").replace(" and ", ", ").split(", ")
    assert names == sorted(ARCHITECTURES)


BOS = "tokenizer.ggml.add_bos_token"


@pytest.mark.parametrize(
    ("changes", "begins"),
    [
        ({}, False), ({BOS: True}, True), ({"tokenizer.ggml.pre": "llama-bpe"}, True),
        ({"tokenizer.ggml.pre": "llama-bpe", BOS: False}, False), (HARMLESS, False),
    ],
)  # fmt: skip
def test_a_text_begins_as_by_llama_cpp_and_keys_without_effect_are_taken(
    changes: dict[str, Any], begins: bool, llama: Path, tmp_path: Path
) -> None:
    path = convert(llama, tmp_path / "model.gguf", 300, keys(changes))
    artifact = export_tiny(path, tmp_path / "artifact")
    ids = AutoTokenizer.from_pretrained(artifact)("\0\1\2").input_ids
    assert len(ids) > 1 and ids.count(1) == int(begins) and (ids[0] == 1) is begins
