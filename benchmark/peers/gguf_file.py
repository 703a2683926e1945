# SPDX-License-Identifier: Apache-2.0
"""A checkpoint folder of a Llama as a GGUF file, without a vocabulary: workers exchange token ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file
from torch import Tensor


# Of transformers' names to GGUF's; those of layers begin with their number.
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(checkpoint: Path) -> Path:
    """Writes `model.gguf` into the folder, unless it is there.

    Raises:
        ValueError: the checkpoint is no Llama.
    """
    path = checkpoint / "model.gguf"
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "llama":
        raise ValueError(
            f"GGUF is written for model_type llama, not {config['model_type']!r}; leave out the peer llamacpp"
        )
    if path.is_file():
        return path
    unfinished = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(unfinished, "llama")
    _describe(writer, config)
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        _add(writer, gguf_name(name), _rows_as_rope_takes_them(name, tensor, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return unfinished.rename(path)


def _describe(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")


def gguf_name(name: str) -> str:
    """GGUF's name of a transformers weight."""
    stem = name.removesuffix(".weight")
    if stem in NAMES:
        return f"{NAMES[stem]}.weight"
    number, _, rest = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{LAYER_NAMES[rest]}.weight"


def _rows_as_rope_takes_them(name: str, tensor: Tensor, config: dict[str, Any]) -> Tensor:
    """llama.cpp rotates neighbours, transformers a head's halves: rows of queries and keys change places."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    return tensor.unflatten(0, (config[heads], 2, -1)).transpose(1, 2).reshape(tensor.shape)


def _add(writer: gguf.GGUFWriter, name: str, tensor: Tensor) -> None:
    """Norms in float32, as llama.cpp takes them, all else as it is."""
    if tensor.dtype == torch.bfloat16 and tensor.dim() > 1:
        kind = gguf.GGMLQuantizationType.BF16
        writer.add_tensor(name, tensor.contiguous().view(torch.uint8).numpy(), raw_dtype=kind)
    else:
        writer.add_tensor(name, tensor.float().contiguous().numpy())
