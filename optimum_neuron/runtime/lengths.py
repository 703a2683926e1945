# SPDX-License-Identifier: Apache-2.0
"""The lengths that fit a slot and the token ids that a model takes: the one place that knows. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..config import NeuronConfig


def most_new_tokens(prompt_tokens: int, sizes: NeuronConfig, rows: int = 1) -> int:
    """Return how many tokens can follow the prompt of each of `rows` rows; the last one is never fed back, so the cache has no row for it."""
    length = sizes.sequence_length
    if rows > 1 and sizes.kv_block_size:
        length = min(length, sizes.kv_blocks // rows * sizes.block_length)
    return length - prompt_tokens + 1


def check_length(prompt_tokens: int, new_tokens: int | None, sizes: NeuronConfig, what: str = "a prompt") -> int:
    """Return `new_tokens`, or the most that fit where it is None. `what` begins an error's message.

    Raises ValueError if a slot does not hold the prompt and all but the last new token, or one of them is not there.
    """
    length, most = sizes.sequence_length, most_new_tokens(prompt_tokens, sizes)
    if not prompt_tokens:
        raise ValueError(f"{what} has 0 tokens, but needs at least 1; start it with a begin token")
    if new_tokens is not None and new_tokens < 1:
        raise ValueError(
            f"{what} is to get max_new_tokens={new_tokens}, but must get at least 1; raise it or leave it out"
        )
    if most < 1:
        raise ValueError(
            f"{what} of {prompt_tokens:,} tokens does not fit sequence_length={length}; shorten it, or export with a larger "
            f"--sequence-length"
        )
    if new_tokens is None:
        return most
    if new_tokens > most:
        raise ValueError(
            f"{what} of {prompt_tokens:,} tokens and {new_tokens:,} new tokens do not fit sequence_length={length}; lower "
            f"max_new_tokens to {most:,}, or export with a larger --sequence-length"
        )
    return new_tokens


def check_fits(prompts: Sequence, new_tokens: int, sizes: NeuronConfig) -> None:
    """Raise ValueError where rows or tokens exceed the compiled sizes."""
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
        count_blocks(count_cached(prompts, new_tokens), sizes)


def count_cached(prompts: Sequence, new_tokens: int) -> list[int]:
    """Return tokens of each row that the cache has to hold."""
    return [len(prompt) + new_tokens - 1 for prompt in prompts]


def count_blocks(tokens: Sequence[int], config: NeuronConfig) -> list[int]:
    """Return the blocks that rows of so many tokens take; raise ValueError if there are fewer."""
    needed = [config.blocks_of(count) for count in tokens]
    if sum(needed) > config.kv_blocks:
        raise ValueError(
            f"{len(tokens)} rows of {', '.join(map(str, tokens))} tokens take {sum(needed) * config.block_length:,} tokens of "
            f"the cache in blocks of {config.block_length}, and kv_cache_tokens={config.kv_blocks * config.block_length:,}; pass "
            f"fewer rows at a time, lower max_new_tokens, or export with a larger --kv-cache-tokens"
        )
    return needed


def check_token_ids(token_ids: np.ndarray, size: int, what: str) -> None:
    """Check token ids of any shape and width; `what` begins an error's message.

    Raises TypeError if they are no whole numbers; ValueError if one is negative or not below `size`.
    """
    if not token_ids.size:
        return
    if token_ids.dtype.kind not in "iu":
        raise TypeError(f"{what} holds {token_ids.dtype} values; give whole numbers from 0 to {size - 1}")
    low, high = int(token_ids.min()), int(token_ids.max())
    if low < 0 or high >= size:
        raise ValueError(
            f"{what} has the token id {low if low < 0 else high}, and the model's are 0 to {size - 1}; take ids from its own "
            f"tokenizer"
        )
