# SPDX-License-Identifier: Apache-2.0
"""The real tokens of prompts, out of batches as callers have them: padded rows, or prompts packed one behind another."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from torch import Tensor


def unpad(input_ids: Tensor, attention_mask: Tensor | None) -> list[np.ndarray]:
    """The real tokens of each row, whichever side the padding is on, as int32.

    Raises:
        ValueError: a row has no token, or its mask has a hole.
    """
    if attention_mask is None:
        return list(input_ids.numpy().astype(np.int32))
    prompts = []
    for row, (token_ids, mask) in enumerate(zip(input_ids.numpy(), attention_mask.numpy() != 0, strict=True)):
        real = np.flatnonzero(mask)
        if not len(real):
            raise ValueError(f"row {row} of attention_mask masks every token; give each prompt at least one")
        if real[-1] - real[0] + 1 != len(real):
            raise ValueError(
                f"row {row} of attention_mask has a hole; only padding on the left or right can be masked"
            )
        prompts.append(token_ids[real].astype(np.int32))
    return prompts


def unpack(input_ids: Tensor, cu_seqlens: Tensor) -> list[np.ndarray]:
    """The prompts of a packed row, as int32.

    Args:
        input_ids: `[1, tokens]`, prompts one behind another.
        cu_seqlens: `[prompts + 1]`, where each prompt starts, and the number of tokens: the cumulative sequence lengths
            of variable-length attention (Dao 2023, arXiv 2307.08691).

    Raises:
        ValueError: `cu_seqlens` does not start at 0, does not rise, or does not end with the number of tokens.
    """
    starts, tokens = cu_seqlens.flatten().tolist(), input_ids.numel()
    if cu_seqlens.dim() != 1 or len(starts) < 2 or starts[0] != 0:
        raise ValueError(f"cu_seqlens={starts} must be one row that starts at 0 and names each prompt's end")
    if any(later <= earlier for earlier, later in pairwise(starts)):
        raise ValueError(f"cu_seqlens={starts} must rise: each prompt has at least one token")
    if starts[-1] != tokens or input_ids.shape[0] != 1:
        raise ValueError(
            f"cu_seqlens={starts} must end with the number of tokens of one packed row, and input_ids has shape "
            f"{list(input_ids.shape)}"
        )
    packed = input_ids[0].numpy().astype(np.int32)
    return [packed[start:stop] for start, stop in pairwise(starts)]
