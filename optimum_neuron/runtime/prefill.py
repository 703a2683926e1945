# SPDX-License-Identifier: Apache-2.0
"""Prefill: whole prompts through chunk steps, `ctx_batch_size` of them at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .runner import GREEDY, Chunk, GraphRunner, SamplingParams


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
    _check_lengths(runner, prompts)
    tokens: list[Tensor] = [torch.empty(0)] * len(prompts)
    logits: list[Tensor] = [torch.empty(0)] * len(prompts)
    waiting = list(range(len(prompts)))
    running: list[int] = []
    longest = runner.config.chunk_sizes[-1]
    sampled = False
    while waiting or running:
        while waiting and len(running) < runner.config.ctx_batch_size:
            running.append(waiting.pop(0))
        chunks = []
        for row in running:
            start = runner.lengths[row]
            draw = 0.0 if uniforms is None else float(uniforms[row])
            chunks.append(Chunk(row, prompts[row][start : start + longest], sampling, draw))
        output = runner.prefill(chunks)
        assert output.chunk_logits is not None
        for index, row in enumerate(running):
            # Copied: a graph may use its output memory again in the next run.
            logits[row] = output.chunk_logits[index].clone()
            if output.chunk_tokens is not None:
                sampled = True
                tokens[row] = output.chunk_tokens[index].clone()
        running = [row for row in running if runner.lengths[row] < len(prompts[row])]
    return torch.stack(tokens) if sampled else None, torch.stack(logits)


def _check_lengths(runner: GraphRunner, prompts: Sequence[np.ndarray]) -> None:
    """All prompts are checked before the first chunk of any is written."""
    sizes = runner.config
    if len(prompts) > sizes.batch_size:
        raise ValueError(f"{len(prompts)} prompts do not fit batch_size={sizes.batch_size}")
    for row, prompt in enumerate(prompts):
        if runner.lengths[row]:
            raise ValueError(f"slot {row} holds {runner.lengths[row]} tokens; reset it before a new prompt")
        if not 1 <= len(prompt) <= sizes.sequence_length:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens does not fit 1 to sequence_length={sizes.sequence_length}"
            )
