# SPDX-License-Identifier: Apache-2.0
"""GGUF files of a tiny Llama, by the package gguf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer


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


def write_gguf(
    checkpoint: Path, path: Path, kind: str, without: Sequence[str] = (), sampling: Mapping[str, float] | None = None
) -> dict[str, Tensor]:
    """Writes a tiny Llama, but for some weights, with defaults of generation; returns the weights that the file stands for, by transformers' names."""
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
    for name, value in (sampling or {}).items():
        getattr(writer, f"add_sampling_{name}")(value)
    vocab = AutoTokenizer.from_pretrained(checkpoint).get_vocab()
    tokens = [*sorted(vocab, key=vocab.__getitem__), "ab"]
    add_tokenizer(writer, tokens, [3 if token.startswith("<") and len(token) > 1 else 1 for token in tokens], "a b")
    exact = {}
    for name, tensor in model.state_dict().items():
        if name in without:
            continue
        heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else 0
        stored = swap_halves(tensor, heads, back=False) if heads else tensor
        chosen = gguf.GGMLQuantizationType[kind if tensor.ndim == 2 else "F32"]
        # Blocks of IQ4_NL have the layout of Q4_0's; the package writes none.
        written = gguf.GGMLQuantizationType.Q4_0 if chosen.name == "IQ4_NL" else chosen
        data = gguf.quants.quantize(stored.numpy(), written)
        plain = torch.from_numpy(np.array(gguf.quants.dequantize(data, chosen))).reshape(tensor.shape)
        exact[name] = swap_halves(plain, heads, back=True) if heads else plain
        writer.add_tensor(gguf_name(name), data, raw_dtype=chosen)
    close_writer(writer)
    return exact


def close_writer(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: Any, tokens: Sequence[str], types: Sequence[int], merge: str) -> None:
    """A tokenizer with one merge, and with tokens that pad, begin and end a text."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([merge])
    writer.add_pad_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
