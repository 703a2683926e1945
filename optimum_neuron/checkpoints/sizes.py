# SPDX-License-Identifier: Apache-2.0
"""Sizes and types that a checkpoint names, checked before anything is built by them: those that no model has, or its weights have not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from ..errors import first_line
from ..option_checks import LARGEST_SIZE
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
    """Raises ValueError where a document names a size that no model has, or a type of weights that is none.

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


def check_describes_weights(
    config: PreTrainedConfig,
    stored: StoredWeights,
    source: str,
    *,
    trust_remote_code: bool,
    codes_in_a_number: int = 1,
) -> None:
    """Builds a model without memory, and compares how much it holds with what its checkpoint has.

    Args:
        config: of a causal language model; is changed, as transformers does.
        stored: what the checkpoint's files hold.
        codes_in_a_number: quantized weights in one number of the files, at most.

    Raises:
        ValueError: no model can be built by the config, or one several times as large.
    """
    layers = getattr(config, "num_hidden_layers", None) or 0
    if layers > stored.tensors:
        raise ValueError(
            f"{source}: its config names {layers} layers, and its weights are {stored.tensors} tensors; correct the config, or "
            f"download the checkpoint again"
        )
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation="eager", trust_remote_code=trust_remote_code
            )
    except Exception as error:  # whatever a model's code comes to by wrong numbers
        raise ValueError(
            f"{source}: no {config.model_type} model can be built by its config ({first_line(error)}); correct it, or download it "
            f"again"
        ) from error
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if parameters > _TIMES_STORED * codes_in_a_number * stored.elements:
        raise ValueError(
            f"{source}: its config describes {type(model).__name__} with {parameters:,} parameters, and its weights hold "
            f"{stored.elements:,} numbers; correct the config, or download the checkpoint again"
        )
