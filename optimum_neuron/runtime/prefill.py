# SPDX-License-Identifier: Apache-2.0
"""Whole prompts through chunk steps, packed into their `ctx_batch_size` rows: for what follows them, or for the logits of all tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..core import PromptPiece, StepOutput
from ..step.family import rows_needed
from ..step.spec import GREEDY, GraphSpec, SamplingParams
from .lengths import check_fits
from .runner import GraphRunner


def cut_pieces(pieces: Iterable[PromptPiece], rows: int, size: int) -> Iterator[list[PromptPiece]]:
    """Cut pieces of prompts into steps of `rows` rows of `size` tokens, and yield the pieces of each step, in order.

    A long one takes as many rows as are left; a row never holds two prompts.
    """
    step: list[PromptPiece] = []
    free = rows
    for piece in pieces:
        taken = 0
        while taken < piece.count:
            if not free:
                yield step
                step, free = [], rows
            count = min(piece.count - taken, free * size)
            step.append(piece.slice_tokens(taken, count))
            free -= rows_needed([count], size)
            taken += count
    if step:
        yield step


def cut_prompt(slot: int, token_ids: np.ndarray, size: int) -> list[PromptPiece]:
    """Cut a prompt into pieces of up to `size` tokens, each for a step of its own."""
    return [piece for step in cut_pieces([PromptPiece(slot, token_ids)], 1, size) for piece in step]


def prefill_prompts(
    runner: GraphRunner,
    prompts: Sequence[np.ndarray],
    sampling: SamplingParams = GREEDY,
    uniforms: np.ndarray | None = None,
    *,
    logits: bool = True,
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Write prompt i into slot i, which must be free, and return what follows each.

    Args:
        uniforms: `[rows]` float32 in [0, 1), one draw for each row's first token.
        logits: whether the caller reads logits.

    Returns:
        Tokens `[rows]` int32 from the on-device sampler, None without one, and logits `[rows, vocab]` float32, None if not read.

    Raises:
        ValueError: too many prompts, or one that does not fit its slot. No slot is changed.
    """
    check_fits(prompts, 1, runner.config)
    for row in range(len(prompts)):
        if runner.lengths[row]:
            raise ValueError(f"slot {row} holds {runner.lengths[row]} tokens; reset it before a new prompt")
    pieces = [
        PromptPiece(row, prompt, sampling, 0.0 if uniforms is None else float(uniforms[row]))
        for row, prompt in enumerate(prompts)
    ]
    tokens: dict[int, np.ndarray] = {}
    kept: dict[int, np.ndarray] = {}

    def keep_rows(output: StepOutput, ends: Mapping[int, int]) -> None:
        for index, row in ends.items():  # copied, as a graph may use its memory again in the next run
            if output.chunk_tokens is not None:
                tokens[row] = output.chunk_tokens[index].copy()
            if logits:
                assert output.chunk_logits is not None
                kept[row] = output.chunk_logits[index].copy()

    started: list[tuple[Callable[[], StepOutput], dict[int, int]]] = []
    for step in cut_pieces(pieces, runner.config.ctx_batch_size, runner.config.prefill_chunk_size):
        ends = {index: piece.slot for index, piece in enumerate(step) if piece.is_last}
        if runner.runs_ahead:
            started.append((runner.start_step(step, logits=logits and bool(ends)), ends))
        else:
            keep_rows(runner.run_step(step, logits=logits, outputs=bool(ends)), ends)
    for wait, ends in started:
        if ends:
            keep_rows(wait(), ends)
    return _stack_rows(tokens), _stack_rows(kept)


def _stack_rows(rows: Mapping[int, np.ndarray]) -> np.ndarray | None:
    return np.stack([rows[row] for row in range(len(rows))]) if rows else None


class BatchPlace(NamedTuple):
    """The place of a prompt's first token in the batch that its caller gave."""

    row: int
    column: int


def score_prompts(
    runner: GraphRunner,
    prompts: Sequence[np.ndarray],
    places: Sequence[BatchPlace],
    columns: np.ndarray,
    out: np.ndarray,
) -> None:
    """Write prompt i into slot i, which must be free, and the logits of its tokens into a batch.

    All pieces run in graphs of one kind, even those with logits that are not kept, so that what is kept changes no bit.

    Args:
        columns: `[kept]` int64, the columns of the batch that are kept.
        out: `[rows, kept, vocab]` float32; places without a prompt's token stay as they are.

    Raises:
        ValueError: the artifact has no graph that scores. No slot is changed.
    """
    pieces = [PromptPiece(row, prompt) for row, prompt in enumerate(prompts)]
    for step in cut_pieces(pieces, runner.config.ctx_batch_size, runner.config.prefill_chunk_size):
        firsts = [places[piece.slot].column + piece.start for piece in step]
        kept = [
            np.flatnonzero((columns >= first) & (columns < first + piece.count))
            for first, piece in zip(firsts, step, strict=True)
        ]
        is_read = any(len(each) for each in kept)
        output = runner.run_step(step, graph=find_scoring_graph(runner, step), logits=is_read, outputs=is_read)
        if is_read:
            for piece, first, own, logits in zip(step, firsts, kept, output.of_prompts(step), strict=True):
                out[places[piece.slot].row, own] = logits[columns[own] - first]


def find_scoring_graph(runner: GraphRunner, pieces: Sequence[PromptPiece]) -> GraphSpec:
    """Return the graph in which a step of pieces scores; raise ValueError if there is none."""
    context = max(int(runner.lengths[piece.slot]) + piece.count for piece in pieces)
    return runner.family.select("scoring", context, [piece.count for piece in pieces])
