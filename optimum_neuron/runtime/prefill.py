# SPDX-License-Identifier: Apache-2.0
"""Prefill: whole prompts through chunk steps, packed into their `ctx_batch_size` rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..step.family import rows_needed
from ..step.spec import GREEDY, SamplingParams
from .limits import check_fits
from .runner import GraphRunner
from .step_tensors import Chunk, StepOutput


def prefill(
    runner: GraphRunner,
    prompts: Sequence[np.ndarray],
    sampling: SamplingParams = GREEDY,
    uniforms: np.ndarray | None = None,
    *,
    logits: bool = True,
) -> tuple[Tensor | None, Tensor | None]:
    """Writes prompt i into slot i, which must be free, and returns what follows each.

    Args:
        prompts: token ids of each row, at most `batch_size` of them, each at most `sequence_length` long.
        uniforms: `[rows]` float32 in [0, 1), one draw for each row's first token.
        logits: whether somebody reads logits.

    Returns:
        Tokens `[rows]` int32 from the on-device sampler, None without one, and logits `[rows, vocab]` float32, None where nobody
        reads them.

    Raises:
        ValueError: too many prompts, or one that does not fit its slot. No slot is changed.
    """
    check_fits(prompts, 1, runner.config)
    for row in range(len(prompts)):
        if runner.lengths[row]:
            raise ValueError(f"slot {row} holds {runner.lengths[row]} tokens; reset it before a new prompt")
    found = _Found({}, {}, logits)
    started: list[tuple[Callable[[], StepOutput], dict[int, int]]] = []
    unfinished = list(range(len(prompts)))
    while unfinished:
        chunks = next_chunks(runner, prompts, unfinished, sampling, uniforms)
        ends = {
            index: chunk.slot
            for index, chunk in enumerate(chunks)
            if runner.lengths[chunk.slot] + len(chunk.token_ids) == len(prompts[chunk.slot])
        }
        if runner.runs_ahead:
            started.append((runner.start(chunks, logits=logits and bool(ends)), ends))
        else:
            found.keep(runner.step(chunks, logits=logits, outputs=bool(ends)), ends)
        unfinished = [row for row in unfinished if runner.lengths[row] < len(prompts[row])]
    for wait, ends in started:
        if ends:
            found.keep(wait(), ends)
    return _in_order(found.tokens), _in_order(found.logits)


class _Found(NamedTuple):
    """What follows prompts, by row."""

    tokens: dict[int, Tensor]
    logits: dict[int, Tensor]
    keeps_logits: bool

    def keep(self, output: StepOutput, ends: Mapping[int, int]) -> None:
        """Args: ends: chunk to row, of the chunks that end a prompt."""
        for index, row in ends.items():  # copied: a graph may use its output memory again in the next run
            if output.chunk_tokens is not None:
                self.tokens[row] = output.chunk_tokens[index].clone()
            if self.keeps_logits:
                assert output.chunk_logits is not None
                self.logits[row] = output.chunk_logits[index].clone()


def _in_order(rows: Mapping[int, Tensor]) -> Tensor | None:
    return torch.stack([rows[row] for row in range(len(rows))]) if rows else None


def next_chunks(
    runner: GraphRunner,
    prompts: Sequence[np.ndarray],
    unfinished: Sequence[int],
    sampling: SamplingParams = GREEDY,
    uniforms: np.ndarray | None = None,
) -> list[Chunk]:
    """Fills the rows of one step in the order of the prompts; a long prompt takes as many rows as are left.

    Args:
        prompts: prompt i is slot i's, of which the runner knows how much is written.
        unfinished: those of which tokens are left.
        uniforms: as `prefill`.
    """
    size, rows = runner.config.prefill_chunk_size, runner.config.ctx_batch_size
    chunks = []
    for row in unfinished:
        start = runner.lengths[row]
        piece = prompts[row][start : start + rows * size]
        chunks.append(Chunk(row, piece, sampling, 0.0 if uniforms is None else float(uniforms[row])))
        rows -= rows_needed([len(piece)], size)
        if not rows:
            break
    return chunks
