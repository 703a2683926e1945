# SPDX-License-Identifier: Apache-2.0
"""What compiled graphs cannot do, refused in one sentence before any slot is touched. Knows no graphs, only sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import numpy as np
from torch import Tensor
from transformers import GenerationConfig

from ..artifact.artifact import Artifact
from ..config import NeuronConfig
from .block_tables import blocks_needed
from .lengths import check_length
from .refused import refuse_settings
from .token_ids import check_token_ids


def check_fits(prompts: Sequence, new_tokens: int, sizes: NeuronConfig) -> None:
    """Raises ValueError where rows or tokens exceed the compiled sizes."""
    if len(prompts) > sizes.batch_size:
        raise ValueError(
            f"{len(prompts)} rows (prompts times num_return_sequences) do not fit batch_size={sizes.batch_size}; pass "
            f"fewer at a time, or export with a larger --batch-size"
        )
    lengths = [len(prompt) for prompt in prompts]
    if not lengths:
        raise ValueError("a batch of 0 prompts; give at least 1")
    for length in {min(lengths), max(lengths)}:
        check_length(length, new_tokens, sizes)
    if sizes.kv_block_size is not None:
        blocks_needed(cache_tokens(prompts, new_tokens), sizes)


def cache_tokens(prompts: Sequence, new_tokens: int) -> list[int]:
    """Tokens of each row that the cache has to hold: the last new one is returned and never fed back."""
    return [len(prompt) + new_tokens - 1 for prompt in prompts]


def refuse_other_options(artifact: Artifact, config: NeuronConfig, given: Collection[str]) -> None:
    """Raises ValueError where one of the `given` options asks for something that the artifact was not compiled with."""
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
    """The token that rows get behind their end token, None where a row has none to wait for.

    Raises:
        ValueError: there is none, or the model does not take it.
    """
    if rows == 1:
        return None
    if pad is None:
        raise ValueError("rows end at an end token, and there is no token to pad them with; set pad_token_id")
    check_token_ids(pad.numpy(), num_embeddings, "pad_token_id")
    return int(pad)


def refuse_unsupported(generation_config: GenerationConfig, vocab_size: int) -> None:
    """Raises ValueError for options of `generate` that compiled graphs cannot honour; none is ignored."""
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        forced = getattr(generation_config, name, None)
        if forced is not None:
            check_token_ids(np.asarray(forced), vocab_size, name)
    refuse_settings(vars(generation_config), returns_dict=generation_config.return_dict_in_generate)
