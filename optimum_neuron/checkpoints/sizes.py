# SPDX-License-Identifier: Apache-2.0
"""Sizes and types that a checkpoint names, checked before anything is built by them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from ..config import LARGEST_SIZE
from .files import StoredWeights
from .mapped import NAMED


# Several times the deepest decoders and the most experts: transformers makes lists and modules of as many.
_MOST = {
    "block_count": 1000, "num_hidden_layers": 1000, "num_layers": 1000, "n_layer": 1000, "n_layers": 1000,
    "num_experts": 10_000, "num_local_experts": 10_000, "n_routed_experts": 10_000, "expert_count": 10_000,
}  # fmt: skip
# At least one of each, by the names of transformers' configs and of GGUF.
_NEEDED = (
    "num_hidden_layers", "n_layer", "n_layers", "num_attention_heads", "n_head", "num_key_value_heads", "hidden_size", "n_embd",
    "d_model", "head_dim", "vocab_size", "block_count", "embedding_length", "attention.head_count", "attention.head_count_kv",
)  # fmt: skip
_TYPES = ("dtype", "torch_dtype")
# Its types are those of codes, and others check them.
_OF_ANOTHER_KIND = "quantization_config"
# Weights that the files lack may be filled in by transformers (tied ones), and are then looked for by name.
_TIMES_STORED = 2


def check_sizes(document: Mapping[str, Any], where: str) -> None:
    """Raise ValueError where a document names a size that no model has, or an unknown type of weights.

    Args:
        document: sizes by name, as in a config.json or a GGUF header; parts of it may be documents again.
        where: the file, for the message.
    """
    for name, value in document.items():
        if isinstance(value, Mapping) and name != _OF_ANOTHER_KIND:
            check_sizes(value, where)
        if name in _TYPES and value is not None and not (isinstance(value, str) and value in NAMED):
            raise ValueError(
                f"{where} names {name}={value!r:.60}, which is no type of weights; write one such as 'bfloat16'"
            )
        if isinstance(value, bool) or not isinstance(value, int):
            continue
        if name in _NEEDED and value < 1:
            raise ValueError(
                f"{where} names {name}={value}, and a model has at least 1; correct it, or download it again"
            )
        most = _MOST.get(name, LARGEST_SIZE) if name in (*_MOST, *_NEEDED) else None
        if most is not None and value > most:
            raise ValueError(
                f"{where} names {name}={value}, and no model has more than {most}; correct it, or download it again"
            )


def check_layers(config: PreTrainedConfig, stored: StoredWeights, source: str) -> None:
    """Raise ValueError where a config names more layers than its checkpoint has tensors; before a model is built by it."""
    layers = getattr(config, "num_hidden_layers", None) or 0
    if layers > stored.tensors:
        raise ValueError(
            f"{source}: its config names {layers} layers, and its weights are {stored.tensors} tensors; correct the config, or "
            f"download the checkpoint again"
        )


def check_parameters(model: PreTrainedModel, stored: StoredWeights, source: str) -> None:
    """Raise ValueError where a model is several times as large as its checkpoint's weights; it may be without memory."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if parameters > _TIMES_STORED * stored.elements:
        raise ValueError(
            f"{source}: its config describes {type(model).__name__} with {parameters:,} parameters, and its weights hold "
            f"{stored.elements:,} numbers; correct the config, or download the checkpoint again"
        )
