# SPDX-License-Identifier: Apache-2.0
"""Prefill: whole prompts through chunk steps, packed into their `ctx_batch_size` rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..graphs.spec import GREEDY, SamplingParams
from .limits import check_fits
from .runner import GraphRunner
from .step_tensors import Chunk


def prefill(
    runner: GraphRunner,
    prompts: Sequence[np.ndarray],
    sampling: SamplingParams = GREEDY,
    uniforms: np.ndarray | None = None,
) -> tuple[Tensor | None, Tensor]:
    """Writes prompt i into slot i, which must be free, and returns what follows each.

    Args:
        prompts: token ids of each row, at most `batch_size` of them, each at most `sequence_length` long.
        uniforms: `[rows]` float32 in [0, 1), one draw for each row's first token.

    Returns:
        Tokens `[rows]` int32 from the on-device sampler, None without one, and logits `[rows, vocab]` float32.

    Raises:
        ValueError: too many prompts, or one that does not fit its slot. No slot is changed.
    """
    check_fits(prompts, 1, runner.config)
    for row in range(len(prompts)):
        if runner.lengths[row]:
            raise ValueError(f"slot {row} holds {runner.lengths[row]} tokens; reset it before a new prompt")
    tokens: list[Tensor] = [torch.empty(0)] * len(prompts)
    logits: list[Tensor] = [torch.empty(0)] * len(prompts)
    unfinished = list(range(len(prompts)))
    sampled = False
    while unfinished:
        chunks = _next_chunks(runner, prompts, unfinished, sampling, uniforms)
        output = runner.prefill(chunks)
        assert output.chunk_logits is not None
        for index, chunk in enumerate(chunks):
            # Copied: a graph may use its output memory again in the next run.
            logits[chunk.slot] = output.chunk_logits[index].clone()
            if output.chunk_tokens is not None:
                sampled = True
                tokens[chunk.slot] = output.chunk_tokens[index].clone()
        unfinished = [row for row in unfinished if runner.lengths[row] < len(prompts[row])]
    return torch.stack(tokens) if sampled else None, torch.stack(logits)


def _next_chunks(
    runner: GraphRunner,
    prompts: Sequence[np.ndarray],
    unfinished: Sequence[int],
    sampling: SamplingParams,
    uniforms: np.ndarray | None,
) -> list[Chunk]:
    """Fills the rows of one step in the order of the prompts; a long prompt takes as many rows as are left."""
    size, rows = runner.config.prefill_chunk_size, runner.config.ctx_batch_size
    chunks = []
    for row in unfinished:
        start = runner.lengths[row]
        piece = prompts[row][start : start + rows * size]
        chunks.append(Chunk(row, piece, sampling, 0.0 if uniforms is None else float(uniforms[row])))
        rows -= -(-len(piece) // size)
        if not rows:
            break
    return chunks
