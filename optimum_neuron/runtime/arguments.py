# SPDX-License-Identifier: Apache-2.0
"""Arguments of `generate` that it would ignore or fail on later: refused before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor
from transformers import GenerationConfig

from .refused import check_settings
from .token_ids import check_token_ids, check_whole_numbers


_WHOLE = (
    "max_new_tokens", "max_length", "min_new_tokens", "min_length", "num_return_sequences", "pad_token_id",
    "bos_token_id", "eos_token_id",
)  # fmt: skip
# What `_sample` is given; the last two mean something with return_dict_in_generate only, and are then refused.
_MODEL_ARGUMENTS = {"input_ids", "attention_mask", "output_attentions", "output_hidden_states"}


def check_options(given: GenerationConfig | None, defaults: GenerationConfig, options: dict[str, Any]) -> None:
    """Looks at what a call asks for, not at the checkpoint's defaults: these may be meant for training.

    Raises:
        TypeError: `given` is no GenerationConfig, or a length or a token id is no whole number.
        ValueError: an option asks for what compiled graphs cannot do.
    """
    if given is not None and not isinstance(given, GenerationConfig):
        raise TypeError(f"generation_config is a {type(given).__name__}; give a transformers GenerationConfig")
    asked = {} if given is None else vars(given)
    asked = {name: value for name, value in asked.items() if value != getattr(defaults, name, None)} | options
    for name in _WHOLE:
        value = asked.get(name)
        values = value.flatten().tolist() if isinstance(value, Tensor) else value
        check_whole_numbers(() if values is None else values if isinstance(values, list | tuple) else (values,), name)
    if asked.get("num_return_sequences") is not None and asked["num_return_sequences"] < 1:
        raise ValueError(f"num_return_sequences={asked['num_return_sequences']} must be at least 1; leave it out")
    check_settings(asked, returns_dict=asked.get("return_dict_in_generate", defaults.return_dict_in_generate))


def check_model_arguments(arguments: dict[str, Any]) -> None:
    """Raises ValueError for what transformers would hand to a model's forward pass, and compiled graphs do not take."""
    unknown = sorted(name for name, value in arguments.items() if value is not None and name not in _MODEL_ARGUMENTS)
    if unknown:
        raise ValueError(
            f"generate does not take {', '.join(unknown)}: compiled graphs number positions from the attention mask, and take "
            f"input_ids and attention_mask only; leave it out, or correct the name"
        )


def checked_prefix(allowed_tokens: Callable[[int, Tensor], list[int]], vocab_size: int) -> Callable[..., list[int]]:
    """A `prefix_allowed_tokens_fn` whose tokens are checked: a negative one would count from the end."""

    def allowed(batch_id: int, input_ids: Tensor) -> list[int]:
        tokens = allowed_tokens(batch_id, input_ids)
        check_token_ids(np.asarray(tokens), vocab_size, "what prefix_allowed_tokens_fn returned")
        return tokens

    return allowed
