# SPDX-License-Identifier: Apache-2.0
"""What of a GGUF file is not known, or is not what it should be, is refused by its name in a sentence, before anything is written."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from converted import convert
from helpers import export_tiny
from sharp import sharpen
from tiny import TINY_CONFIGS
from transformers import AutoModelForCausalLM, AutoTokenizer

from optimum_neuron.checkpoints.find import find_checkpoint
from optimum_neuron.checkpoints.gguf.architectures import ARCHITECTURES


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, which files are made of."""
    folder = tmp_path_factory.mktemp("llama")
    model = AutoModelForCausalLM.from_config(TINY_CONFIGS["llama"]())
    sharpen(model)
    model.save_pretrained(folder)
    return folder


def refusal(path: Path) -> str:
    """What the export of a file ends with."""
    with pytest.raises(ValueError, match=r"model\.gguf") as caught:
        find_checkpoint(path, revision=None, token=None, trust_remote_code=False).load_model("auto")
    told = str(caught.value)
    assert "\n" not in told and len(told) < 600
    return told


def key(name: str, value: Any) -> Callable[[Any], None]:
    """Has a file have a key of the type that Python's value has; of arrays, of its first item."""
    kinds = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array", tuple: "array"}
    return lambda writer: getattr(writer, f"add_{kinds[type(value)]}")(name, value)


REFUSED = [
    ("llama.attention.temperature_scale", 0.5, "llama.attention.temperature_scale=0.5, and it is not known"),
    ("llama.attention.scale", 0.5, "llama.attention.scale=0.5, and it is not known what a llama model"),
    ("llama.logit_scale", 0.5, "llama.logit_scale=0.5"),
    ("llama.rope.scaling.alpha", 1000.0, "llama.rope.scaling.alpha=1000.0"),
    ("llama.rope.scaling.yarn_log_multiplier", 0.1, "llama.rope.scaling.yarn_log_multiplier=0.1"),
    ("llama.attention.causal", False, "llama.attention.causal=False: a token of this model attends to later ones"),
    ("llama.nextn_predict_layers", 1, "llama.nextn_predict_layers=1: so many of its last blocks are layers like"),
    ("llama.nextn_predict_layers", 2, "llama.nextn_predict_layers=2: so many of its last blocks are layers like"),
    ("qwen2.block_count", 2, "qwen2.block_count=2, and it is not known"),
    ("adapter.lora.alpha", 16.0, "adapter.lora.alpha=16.0, and it is not known"),
    ("general.type", "adapter", "general.type='adapter': the file holds no model"),
    ("split.count", 3, "split.count=3: the file is one of several parts"),
    ("llama.rope.freq_base", float("nan"), "llama.rope.freq_base=nan, which is not a finite number"),
    ("llama.rope.freq_base", "10000", "llama.rope.freq_base='10000', which is not a finite number"),
    ("llama.attention.layer_norm_rms_epsilon", float("inf"), "epsilon=inf, which is not a finite number"),
    ("llama.feed_forward_length", [96, 96], r"llama.feed_forward_length=[96, 96], which is not a whole number"),
    ("llama.context_length", True, "llama.context_length=True, which is not a whole number"),
    ("llama.attention.head_count", 4.0, "llama.attention.head_count=4.0, which is not a whole number"),
    ("llama.attention.head_count_kv", [2, 1], "llama.attention.head_count_kv=[2, 1]: the layers of this model differ"),
    ("llama.attention.head_count_kv", ["a", "b"], "which is not a whole number or 2 of them"),
    (
        "llama.attention.value_length",
        24,
        "llama.attention.value_length=24: transformers has values as wide as keys, 16",
    ),
    ("llama.vocab_size", 299, "llama.vocab_size=299: token_embd.weight has 300 rows"),
    ("llama.rope.dimension_count", 8, "llama.rope.dimension_count=8: heads of 16 dimensions are rotated as a whole"),
    ("llama.rope.scaling.type", "dynamic", "rope.scaling.type=dynamic and rope.scaling.factor=0.0"),
    ("llama.rope.scaling.type", 2, "llama.rope.scaling.type=2, which is not a text"),
    ("llama.rope.scaling.type", "yarn", "rope.scaling.type=yarn and rope.scaling.factor=0.0"),
    ("llama.rope.scaling.attn_factor", 0.5, "llama.rope.scaling.attn_factor=0.5: it is known of files with"),
    ("tokenizer.ggml.eos_token_id", 300, "tokenizer.ggml.eos_token_id=300: the model has 300 tokens"),
    (
        "general.architecture",
        "rwkv6",
        "has the architecture rwkv6, and GGUF files are read only with bloom, deepseek2",
    ),
]


@pytest.mark.parametrize(
    ("name", "value", "told"), REFUSED, ids=[f"{name}-{value}"[:60] for name, value, _ in REFUSED]
)
def test_a_key_that_is_not_known_or_wrong_is_refused_by_name(
    name: str, value: Any, told: str, llama: Path, tmp_path: Path
) -> None:
    assert told in refusal(convert(llama, tmp_path / "model.gguf", 300, key(name, value)))


HARMLESS = [
    ("llama.rope.scaling.finetuned", True),
    ("llama.rope.scaling.type", "none"),
    ("llama.rope.scaling.attn_factor", 1.0),
    ("llama.attention.causal", True),
    ("general.quantized_by", "someone"),
    ("tokenizer.ggml.add_space_prefix", False),
    ("quantize.imatrix.entries_count", 7),
    ("mradermacher.quantized_by", "someone"),
    ("split.count", 1),
]


def test_keys_without_effect_are_taken(llama: Path, tmp_path: Path) -> None:
    def add(writer: Any) -> None:
        for name, value in HARMLESS:
            key(name, value)(writer)

    path = convert(llama, tmp_path / "model.gguf", 300, add)
    find_checkpoint(path, revision=None, token=None, trust_remote_code=False).load_model("auto")


def tensor(name: str, *values: float) -> Callable[[Any], None]:
    return lambda writer: writer.add_tensor(name, np.array(values, np.float32))


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
    assert told in refusal(convert(llama, tmp_path / "model.gguf", 300, tensor(name, *values)))


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            b"blk.1.ffn_up.weight",
            b"blk.1.ffn_xx.weight",
            "lacks the tensor blk.1.ffn_up.weight, which LlamaForCausalLM",
        ),
        (b"llama.attention.key_length", b"llama.attention.head_count", "it has llama.attention.head_count twice"),
        (b"blk.1.ffn_up.weight", b"blk.0.ffn_up.weight", "it has blk.0.ffn_up.weight twice"),
        (b"llama.block_count", b"llama.block_coumt", "lacks llama.block_count, without which its model is not known"),
        (b"blk.1.attn_v.weight", b"blk.1.attn_k.weight", "it has blk.1.attn_k.weight twice"),
        (b"token_embd.weight", b"token_embx.weight", "lacks the tensor token_embd.weight"),
    ],
)
def test_a_name_that_stands_twice_or_is_missing_is_told(
    old: bytes, new: bytes, told: str, llama: Path, tmp_path: Path
) -> None:
    path = convert(llama, tmp_path / "model.gguf", 300)
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    assert told in refusal(path)


def test_a_tensor_of_other_sizes_than_the_keys_name_is_refused(llama: Path, tmp_path: Path) -> None:
    told = refusal(convert(llama, tmp_path / "model.gguf", 300, key("llama.feed_forward_length", 80)))
    assert "blk.0.ffn_gate.weight of the shape [96, 64]" in told and "gate_proj.weight of the shape [80, 64]" in told


def test_the_page_about_exports_names_the_architectures_that_are_read() -> None:
    page = (Path(__file__).parents[2] / "docs" / "export.md").read_text(encoding="utf-8")
    listed = page.partition("It reads files of the architectures ")[2].partition(".\n")[0]
    names = re.sub(r" \([^)]*\)", "", listed).replace("\n", " ").replace(" and ", ", ").split(", ")
    assert names == sorted(ARCHITECTURES)


def test_an_export_writes_nothing_where_a_key_is_refused(llama: Path, tmp_path: Path) -> None:
    path = convert(llama, tmp_path / "model.gguf", 300, key("llama.attention.scale", 0.5))
    with pytest.raises(ValueError, match=r"llama\.attention\.scale=0\.5"):
        export_tiny(path, tmp_path / "out" / "artifact")
    assert not (tmp_path / "out").exists()


BOS = "tokenizer.ggml.add_bos_token"


@pytest.mark.parametrize(
    ("changes", "begins"),
    [
        ({}, False),
        ({BOS: True}, True),
        ({"tokenizer.ggml.pre": "llama-bpe"}, True),
        ({"tokenizer.ggml.pre": "llama-bpe", BOS: False}, False),
    ],
)
def test_a_text_begins_with_the_token_that_llama_cpp_begins_it_with(
    changes: dict[str, Any], begins: bool, llama: Path, tmp_path: Path
) -> None:
    def add(writer: Any) -> None:
        for name, value in changes.items():
            key(name, value)(writer)

    path = convert(llama, tmp_path / "model.gguf", 300, add)
    artifact = export_tiny(path, tmp_path / "artifact")
    ids = AutoTokenizer.from_pretrained(artifact)("\0\1\2").input_ids
    assert len(ids) > 1 and ids.count(1) == int(begins) and (ids[0] == 1) is begins
