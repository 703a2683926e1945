# SPDX-License-Identifier: Apache-2.0
"""What compiled graphs cannot do, refused in one sentence before any slot is touched. Knows no graphs, only sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import GenerationConfig

from .artifact import Artifact
from .config import NeuronConfig


def check_fits(prompts: Sequence, new_tokens: int, sizes: NeuronConfig) -> None:
    """Raises ValueError where rows or tokens exceed the compiled sizes."""
    if len(prompts) > sizes.batch_size:
        raise ValueError(
            f"{len(prompts)} rows (prompts times num_return_sequences) do not fit batch_size={sizes.batch_size}; pass "
            f"fewer at a time, or export with a larger --batch-size"
        )
    longest = max(len(prompt) for prompt in prompts)
    if longest > sizes.sequence_length:
        raise ValueError(
            f"a prompt of {longest:,} tokens does not fit sequence_length={sizes.sequence_length}; shorten it, or "
            f"export with a larger --sequence-length"
        )
    # The last generated token is returned, but never processed: it needs no row of the cache.
    if longest + new_tokens - 1 > sizes.sequence_length:
        raise ValueError(
            f"a prompt of {longest:,} tokens and {new_tokens:,} new tokens do not fit "
            f"sequence_length={sizes.sequence_length}; lower max_new_tokens to "
            f"{sizes.sequence_length - longest + 1:,}, or export with a larger --sequence-length"
        )


def refuse_other_options(artifact: Artifact, options: dict[str, Any]) -> None:
    """Raises ValueError where an option asks for something that the artifact was not compiled with."""
    compiled = artifact.config.to_dict()
    for name, wanted in NeuronConfig.from_dict(options).to_dict().items() if options else ():
        if name in options and wanted != "auto" and wanted != compiled[name]:
            raise ValueError(
                f"{name}={wanted!r} differs from the {compiled[name]!r} that {artifact.path} was exported with; leave it "
                f"out, or export the checkpoint again"
            )


def refuse_unsupported(generation_config: GenerationConfig, sizes: NeuronConfig) -> None:
    """Raises ValueError for options of `generate` that compiled graphs cannot honour; none is ignored."""
    for name in ("output_attentions", "output_hidden_states"):
        if generation_config.return_dict_in_generate and getattr(generation_config, name, None):
            raise ValueError(f"{name}=True is not supported: the compiled graphs return tokens and logits only")
    if (generation_config.guidance_scale or 1) != 1:
        raise ValueError(
            f"guidance_scale={generation_config.guidance_scale} is not supported: it needs a second cache per row; leave it out"
        )
    chunk = getattr(generation_config, "prefill_chunk_size", None)
    if chunk is not None and chunk != sizes.prefill_chunk_size:
        raise ValueError(
            f"prefill_chunk_size={chunk} differs from the compiled {sizes.prefill_chunk_size}; leave it out of generate()"
        )
