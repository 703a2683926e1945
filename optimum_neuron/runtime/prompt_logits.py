# SPDX-License-Identifier: Apache-2.0
"""Logits of the tokens of whole prompts, by the graphs that score: chunk steps whose every token reaches the head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from ..step.spec import GraphSpec
from .prefill import next_chunks
from .runner import GraphRunner


class Place(NamedTuple):
    """Where a prompt's first token stands in the batch that its caller gave."""

    row: int
    column: int


def prompt_logits(
    runner: GraphRunner, prompts: Sequence[np.ndarray], places: Sequence[Place], columns: Tensor, out: Tensor
) -> None:
    """Writes prompt i into slot i, which must be free, and the logits of its tokens into a batch.

    All chunks run in graphs of one kind, also those of which nobody reads logits, so that what is kept changes no bit.

    Args:
        prompts: token ids of each, which fit the compiled sizes.
        columns: `[kept]` int64, the columns of the batch that are kept.
        out: `[rows, kept, vocab]` float32; what no prompt stands at is left as it is.

    Raises:
        ValueError: the artifact has no graph that scores. No slot is changed.
    """
    unfinished = list(range(len(prompts)))
    while unfinished:
        chunks = next_chunks(runner, prompts, unfinished)
        firsts = [places[chunk.slot].column + int(runner.lengths[chunk.slot]) for chunk in chunks]
        kept = [
            ((columns >= first) & (columns < first + len(chunk.token_ids))).nonzero().flatten()
            for first, chunk in zip(firsts, chunks, strict=True)
        ]
        is_read = any(len(each) for each in kept)
        graph = scoring_graph(runner, [(chunk.slot, len(chunk.token_ids)) for chunk in chunks])
        output = runner.step(chunks, graph=graph, logits=is_read, outputs=is_read)
        if is_read:
            for chunk, first, own, logits in zip(chunks, firsts, kept, output.of_prompts(chunks), strict=True):
                out[places[chunk.slot].row, own] = logits[columns[own] - first]
        unfinished = [slot for slot in unfinished if runner.lengths[slot] < len(prompts[slot])]


def scoring_graph(runner: GraphRunner, chunks: Sequence[tuple[int, int]]) -> GraphSpec:
    """The graph in which a step of chunks scores.

    Args:
        chunks: the slot of each, and how many tokens it has.

    Raises:
        ValueError: there is none.
    """
    context = max(int(runner.lengths[slot]) + count for slot, count in chunks)
    return runner.family.select("scoring", context, [count for _, count in chunks])
