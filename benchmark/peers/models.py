# SPDX-License-Identifier: Apache-2.0
"""The models that all runtimes load: folders as transformers saves them, written once. Measures nothing."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
# How precision is counted: bits of a weight, and bytes of a number in the KV cache.
WEIGHT_BITS = {"float32": 32, "bfloat16": 16, "int8": 8, "int4": 4}
CACHE_BYTES = {"float32": 4, "bfloat16": 2, "int8": 2, "int4": 2}


@dataclass(frozen=True)
class Needs:
    """What a step cannot do without, whoever computes it.

    Attributes:
        bytes: read from memory: each weight once, and the cache.
        operations: of matrix products and attention.
    """

    bytes: float
    operations: float


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama, from its config.json."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    linear_weights: int
    head_weights: int
    vocab_size: int

    @classmethod
    def of(cls, checkpoint: Path) -> Shape:
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
        hidden, heads, kv_heads = (
            config[f"{n}"] for n in ("hidden_size", "num_attention_heads", "num_key_value_heads")
        )
        dim, layers = config["head_dim"], config["num_hidden_layers"]
        layer = hidden * dim * (2 * heads + 2 * kv_heads) + 3 * hidden * config["intermediate_size"]
        vocab_size = config["vocab_size"]
        return cls(layers, heads, kv_heads, dim, layers * layer, hidden * vocab_size, vocab_size)

    @property
    def weights(self) -> int:
        return self.linear_weights + self.head_weights

    def prefill(self, tokens: int, precision: str) -> Needs:
        """Of one prompt; the last token alone goes through the head."""
        attention = 2 * self.layers * self.heads * self.head_dim * tokens**2
        operations = 2 * (self.linear_weights * tokens + self.head_weights) + attention
        return Needs(self.weights * WEIGHT_BITS[precision] / 8, operations)

    def decode(self, rows: int, context: float, precision: str) -> Needs:
        """Of one step of rows with so many tokens in the cache."""
        cached = rows * context * self.layers * self.kv_heads * self.head_dim * 2
        attention = 4 * rows * context * self.layers * self.heads * self.head_dim
        weights = self.weights * WEIGHT_BITS[precision] / 8
        return Needs(weights + cached * CACHE_BYTES[precision], 2 * rows * self.weights + attention)


def checkpoint_folder(model: str, folder: Path) -> Path:
    """The folder of a model, written if need be.

    Raises:
        FileNotFoundError: the package with SmolLM2 is missing.
    """
    from ..model import default_model, plain_checkpoint

    smollm2 = Path(plain_checkpoint(default_model(), "float32", folder))
    return {SMOLLM2: lambda: smollm2, RANDOM_1B: lambda: _random_checkpoint(folder / RANDOM_1B, smollm2)}[model]()


def _random_checkpoint(path: Path, tokenizer: Path) -> Path:
    if path.is_dir():
        return path
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    unfinished = path.with_suffix(".partial")
    config = LlamaConfig(**RANDOM_1B_SIZES, dtype="bfloat16")
    LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(unfinished, max_shard_size="100GB")
    for file in tokenizer.glob("*token*"):
        shutil.copy(file, unfinished)
    return unfinished.rename(path)
