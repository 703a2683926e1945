# SPDX-License-Identifier: Apache-2.0
"""Arguments of `generate` that compiled graphs cannot honour: refused in one sentence before any slot is touched."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
from torch import Tensor
from transformers import GenerationConfig

from ..artifact.artifact import Artifact
from ..config import NeuronConfig
from ..core import check_whole_numbers
from .lengths import check_token_ids
from .refused import check_settings, refuse_settings


def refuse_other_options(artifact: Artifact, config: NeuronConfig, given: Collection[str]) -> None:
    """Raise ValueError where one of the `given` options asks for something that the artifact was not compiled with."""
    if config.target == "auto":
        config = dataclasses.replace(config, target=artifact.target)
    compiled = artifact.config.to_dict()
    if compiled["output_logits"]:  # an export may have turned them on, and they change no token
        given = set(given) - {"output_logits"}
    for name, wanted in config.to_dict().items():
        if name in given and wanted != "auto" and wanted != compiled[name]:
            raise ValueError(
                f"{name}={wanted!r} differs from the {compiled[name]!r} that {artifact.path} was exported with; leave it "
                f"out, or export the checkpoint again"
            )


def check_pad_token(pad: Tensor | None, rows: int, num_embeddings: int) -> int | None:
    """Return the token that rows get after their end token, None for one row; raise ValueError if there is none that fits."""
    if rows == 1:
        return None
    if pad is None:
        raise ValueError("rows end at an end token, and there is no token to pad them with; set pad_token_id")
    check_token_ids(pad.numpy(), num_embeddings, "pad_token_id")
    return int(pad)


def refuse_unsupported(generation_config: GenerationConfig, vocab_size: int) -> None:
    """Raise ValueError for options of `generate` that compiled graphs cannot honour; none is ignored."""
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        forced = getattr(generation_config, name, None)
        if forced is not None:
            check_token_ids(np.asarray(forced), vocab_size, name)
    refuse_settings(vars(generation_config), returns_dict=generation_config.return_dict_in_generate)


_WHOLE = (
    "max_new_tokens", "max_length", "min_new_tokens", "min_length", "num_return_sequences", "pad_token_id",
    "bos_token_id", "eos_token_id",
)  # fmt: skip
# What `_sample` is given; the last two mean something with return_dict_in_generate only, and are then refused.
_MODEL_ARGUMENTS = {"input_ids", "attention_mask", "output_attentions", "output_hidden_states"}


def check_options(given: GenerationConfig | None, defaults: GenerationConfig, options: dict[str, Any]) -> None:
    """Look at what a call asks for, not at the checkpoint's defaults: these may be meant for training.

    Raises TypeError if `given` is no GenerationConfig, or a length or a token id is no whole number; ValueError if
    an option asks for what compiled graphs cannot do.
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
    """Raise ValueError for what transformers would hand to a model's forward pass, and compiled graphs do not take."""
    unknown = sorted(name for name, value in arguments.items() if value is not None and name not in _MODEL_ARGUMENTS)
    if unknown:
        raise ValueError(
            f"generate does not take {', '.join(unknown)}: compiled graphs number positions from the attention mask, and take "
            f"input_ids and attention_mask only; leave it out, or correct the name"
        )


def check_prefix(allowed_tokens: Callable[[int, Tensor], list[int]], vocab_size: int) -> Callable[..., list[int]]:
    """Return a `prefix_allowed_tokens_fn` that checks its tokens: a negative one would count from the end."""

    def allowed(batch_id: int, input_ids: Tensor) -> list[int]:
        tokens = allowed_tokens(batch_id, input_ids)
        check_token_ids(np.asarray(tokens), vocab_size, "what prefix_allowed_tokens_fn returned")
        return tokens

    return allowed
