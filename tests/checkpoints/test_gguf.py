# SPDX-License-Identifier: Apache-2.0
"""GGUF files of every kind that the gguf package writes: dequantized to the numbers that their blocks stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from helpers import artifact_runner, export_tiny, generate, random_tokens
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from optimum_neuron.artifacts.artifact import Artifact
from optimum_neuron.artifacts.weights import read_weights


KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
HEADS, KV_HEADS = 4, 2
LAYER_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
NAMES = {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}


def gguf_name(name: str) -> str:
    if name == "lm_head.weight":
        return "output.weight"
    name = name.removeprefix("model.")
    if not name.startswith("layers."):
        return NAMES[name]
    _, layer, member = name.removesuffix(".weight").split(".", 2)
    return f"blk.{layer}.{LAYER_NAMES[member]}.weight"


def swap_halves(tensor: Tensor, heads: int, *, back: bool) -> Tensor:
    """GGUF has the two halves of each head's rotary dimensions interleaved."""
    half = tensor.shape[0] // heads // 2
    split = tensor.reshape(heads, *((half, 2) if back else (2, half)), -1)
    return split.transpose(1, 2).reshape(tensor.shape)


def write_gguf(checkpoint: Path, path: Path, kind: str) -> dict[str, Tensor]:
    """Writes a tiny Llama; returns the weights that the file stands for, by transformers' names."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, checkpoint)
    exact = {}
    for name, tensor in model.state_dict().items():
        heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else 0
        stored = swap_halves(tensor, heads, back=False) if heads else tensor
        chosen = gguf.GGMLQuantizationType[kind if tensor.ndim == 2 else "F32"]
        data = gguf.quants.quantize(stored.numpy(), chosen)
        plain = torch.from_numpy(np.array(gguf.quants.dequantize(data, chosen))).reshape(tensor.shape)
        exact[name] = swap_halves(plain, heads, back=True) if heads else plain
        writer.add_tensor(gguf_name(name), data, raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return exact


def _add_tokenizer(writer: gguf.GGUFWriter, checkpoint: Path) -> None:
    vocab = AutoTokenizer.from_pretrained(checkpoint).get_vocab()
    tokens = [*sorted(vocab, key=vocab.__getitem__), "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<") and len(token) > 1 else 1 for token in tokens])
    writer.add_token_merges(["a b"])
    writer.add_pad_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_blocks_become_the_numbers_that_they_stand_for(
    dtype: str, kind: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    exact = write_gguf(tiny_checkpoint, tmp_path / "tiny.gguf", kind)
    artifact = export_tiny(tmp_path / "tiny.gguf", tmp_path / "artifact", dtype=dtype)
    assert Artifact.open(artifact).config.dtype == ("float32" if dtype == "auto" else dtype)
    weights = read_weights(Artifact.open(artifact))
    for name, tensor in exact.items():
        assert torch.equal(weights[f"model.{name}"], tensor.to(weights[f"model.{name}"].dtype)), name
    document = json.loads((artifact / "config.json").read_text(encoding="utf-8"))
    assert document["architectures"] == ["LlamaForCausalLM"] and "quantization_config" not in document


def test_the_artifact_answers_as_transformers_with_the_same_numbers(tiny_checkpoint: Path, tmp_path: Path) -> None:
    exact = write_gguf(tiny_checkpoint, tmp_path / "tiny.gguf", "Q4_1")
    artifact = export_tiny(tmp_path / "tiny.gguf", tmp_path / "artifact")
    prompt = random_tokens(20)
    tokens, logits = generate(artifact_runner(artifact), prompt, 5)
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    model.load_state_dict(exact)
    expected = model(input_ids=torch.tensor([[*prompt.tolist(), *tokens]])).logits[0, 19:-1]
    assert tokens == expected.argmax(-1).tolist()
    torch.testing.assert_close(logits, expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("kind", ["truncated", "no gguf", "no tensor"])
def test_a_damaged_file_is_refused(kind: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny_checkpoint, path, "Q8_0")
    content = path.read_bytes()
    path.write_bytes(content[:-4096] if kind == "truncated" else b"x" * 64 if kind == "no gguf" else content)
    if kind == "no tensor":
        path.write_bytes(content.replace(b"blk.1.ffn_up.weight", b"blk.9.ffn_up.weight"))
    with pytest.raises(ValueError, match=r"tiny\.gguf") as caught:
        export_tiny(path, tmp_path / "out" / "artifact")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_an_export_parses_the_file_once(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[str] = []

    class Counting(gguf.GGUFReader):
        def __init__(self, path: str, *args: Any) -> None:
            parsed.append(path)
            super().__init__(path, *args)

    monkeypatch.setattr(gguf, "GGUFReader", Counting)
    write_gguf(tiny_checkpoint, tmp_path / "tiny.gguf", "Q8_0")
    export_tiny(tmp_path / "tiny.gguf", tmp_path / "artifact")
    assert parsed == [str(tmp_path / "tiny.gguf")]
    assert gguf.GGUFReader is Counting
