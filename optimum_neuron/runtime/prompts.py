# SPDX-License-Identifier: Apache-2.0
"""The real tokens of prompts, out of batches as callers have them: padded rows, or prompts packed one after another."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from .lengths import check_token_ids


def _kind(given: object) -> str:
    return str(given.dtype) if isinstance(given, Tensor) else type(given).__name__


def check_prompts(input_ids: Tensor, attention_mask: Tensor | None, num_embeddings: int) -> None:
    """Look at padded rows as a caller gave them.

    Raises TypeError if either is no tensor, or ids are no 32- or 64-bit whole numbers; ValueError if ids are not
    `[rows, tokens]` or not all below `num_embeddings`, or the mask has another shape or other values than 0 and 1.
    """
    if not isinstance(input_ids, Tensor) or input_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"input_ids hold {_kind(input_ids)}; give a tensor of torch.int64, as tokenizers return it")
    if input_ids.dim() != 2 or not input_ids.numel() or input_ids.device.type != "cpu":
        raise ValueError(
            f"input_ids have the shape {list(input_ids.shape)} on {input_ids.device}; give [rows, tokens] on the CPU, at least "
            f"one of each"
        )
    check_token_ids(input_ids.numpy(), num_embeddings, "input_ids")
    if attention_mask is None:
        return
    if not isinstance(attention_mask, Tensor):
        raise TypeError(f"attention_mask is a {_kind(attention_mask)}; give a tensor of the shape of input_ids")
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask has the shape {list(attention_mask.shape)}, and input_ids {list(input_ids.shape)}; give both "
            f"as the tokenizer returns them"
        )
    if not ((attention_mask == 0) | (attention_mask == 1)).all():
        raise ValueError("attention_mask has other values than 1, a real token, and 0, padding; give these two")


def unpad(input_ids: Tensor, attention_mask: Tensor | None, num_embeddings: int) -> list[np.ndarray]:
    """Return the real tokens of each row, whichever side the padding is on, as int32.

    Raises TypeError or ValueError as `check_prompts`; ValueError if a row has no token, or its mask has a hole.
    """
    check_prompts(input_ids, attention_mask, num_embeddings)
    if attention_mask is None:
        return list(input_ids.numpy().astype(np.int32))
    prompts = []
    for row, (token_ids, mask) in enumerate(zip(input_ids.numpy(), attention_mask.numpy() != 0, strict=True)):
        real = np.flatnonzero(mask)
        if not len(real):
            raise ValueError(f"row {row} of attention_mask masks every token; give each prompt at least one")
        if real[-1] - real[0] + 1 != len(real):
            raise ValueError(
                f"row {row} of attention_mask has a hole; only padding on the left or right can be masked (where no mask is given, "
                f"transformers takes the pad token for padding, wherever it is: then give attention_mask)"
            )
        prompts.append(token_ids[real].astype(np.int32))
    return prompts


def unpack(input_ids: Tensor, cu_seqlens: Tensor, num_embeddings: int) -> list[np.ndarray]:
    """Return the prompts of a packed row, as int32.

    Args:
        input_ids: `[1, tokens]`, prompts one after another.
        cu_seqlens: `[prompts + 1]`, where each prompt starts, and the number of tokens: the cumulative sequence lengths
            of variable-length attention (Dao 2023, arXiv 2307.08691).

    Raises TypeError or ValueError as `check_prompts`; or if `cu_seqlens` are no whole numbers that rise from 0 to the number of tokens.
    """
    check_prompts(input_ids, None, num_embeddings)
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens hold {_kind(cu_seqlens)}; give a tensor of torch.int32")
    starts, (rows, tokens) = cu_seqlens.flatten().tolist(), input_ids.shape
    rises = all(earlier < later for earlier, later in pairwise(starts))
    if cu_seqlens.dim() != 1 or len(starts) < 2 or starts[0] or not rises or starts[-1] != tokens or rows != 1:
        raise ValueError(
            f"cu_seqlens={starts} must rise from 0, by at least one token for each prompt, to the tokens of one packed row, and input_ids "
            f"has shape {[rows, tokens]}"
        )
    packed = input_ids[0].numpy().astype(np.int32)
    return [packed[start:stop] for start, stop in pairwise(starts)]
