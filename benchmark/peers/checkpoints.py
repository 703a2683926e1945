# SPDX-License-Identifier: Apache-2.0
"""The checkpoints that all runtimes load: folders as transformers saves them, and a GGUF file of each for llama.cpp."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from ..model import default_model, plain_checkpoint
from .names import RANDOM_1B, SMOLLM2


RANDOM_1B_SIZES: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


def checkpoint_folder(model: str, folder: Path) -> Path:
    """Return the folder of a model, written if need be; raise FileNotFoundError where the package with SmolLM2 is missing."""
    smollm2, path = Path(plain_checkpoint(default_model(), "float32", folder)), folder / RANDOM_1B
    if model == SMOLLM2 or path.is_dir():
        return smollm2 if model == SMOLLM2 else path
    torch.manual_seed(0)
    unfinished = path.with_suffix(".partial")
    config = LlamaConfig(**RANDOM_1B_SIZES, dtype="bfloat16")
    LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(unfinished, max_shard_size="100GB")
    for file in smollm2.glob("*token*"):
        shutil.copy(file, unfinished)
    return unfinished.rename(path)


def write_gguf(checkpoint: Path) -> Path:
    """Write `model.gguf` into the folder, unless it is there. It has no vocabulary: workers exchange token ids.

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
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        _add(
            writer,
            names.mapping[name.removesuffix(".weight")][1] + ".weight",
            _rows_as_rope_takes_them(name, tensor, config),
        )
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


def _rows_as_rope_takes_them(name: str, tensor: Tensor, config: dict[str, Any]) -> Tensor:
    """Reorder rows of queries and keys: llama.cpp rotates neighbours, transformers a head's halves."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    return tensor.unflatten(0, (config[heads], 2, -1)).transpose(1, 2).reshape(tensor.shape)


def _add(writer: gguf.GGUFWriter, name: str, tensor: Tensor) -> None:
    """Add norms in float32, as llama.cpp takes them, all else as it is."""
    if tensor.dtype == torch.bfloat16 and tensor.dim() > 1:
        kind = gguf.GGMLQuantizationType.BF16
        writer.add_tensor(name, tensor.contiguous().view(torch.uint8).numpy(), raw_dtype=kind)
    else:
        writer.add_tensor(name, tensor.float().contiguous().numpy())
