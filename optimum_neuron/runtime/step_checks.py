# SPDX-License-Identifier: Apache-2.0
"""Checks of a step and its graph: each refuses in one sentence before any slot is touched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..config import NeuronConfig
from ..core import PromptPiece
from ..step.family import GraphFamily, holds, rows_needed
from ..step.spec import GraphKind, GraphSpec
from .block_tables import BlockTables
from .lengths import check_token_ids
from .step_tensors import DecodeRows


class GivenStep(NamedTuple):
    """The arguments of a step, and the slots that decode."""

    pieces: Sequence[PromptPiece]
    decode: DecodeRows | None
    slots: Sequence[int]
    graph: GraphSpec | None

    @classmethod
    def from_arguments(
        cls, pieces: Sequence[PromptPiece], decode: DecodeRows | None, graph: GraphSpec | None = None
    ) -> GivenStep:
        return cls(pieces, decode, () if decode is None else decode.list_slots(), graph)

    @property
    def active(self) -> np.ndarray:
        assert self.decode is not None
        return self.decode.active


@dataclass(frozen=True)
class StepChecks:
    """Checks of the parts of a step against the state of a runner's slots. All methods raise ValueError, and change nothing.

    Token ids are checked where `num_embeddings` is known, and those that the model chose with `checks_decodes`.
    """

    config: NeuronConfig
    lengths: memoryview
    tables: BlockTables | None
    family: GraphFamily
    num_embeddings: int | None
    checks_decodes: bool

    def check_decode(self, decode: DecodeRows, slots: Sequence[int], pieces: Sequence[PromptPiece]) -> int:
        """Check decode rows of these slots next to pieces; return how many tokens the longest of them holds."""
        length = self.config.sequence_length
        longest = max([self.lengths[slot] for slot in slots], default=0)
        if longest >= length:
            slot = next(slot for slot in slots if self.lengths[slot] == longest)
            raise ValueError(f"slot {slot} is full: it holds sequence_length={length} tokens")
        if self.tables is not None:
            full = decode.active & (np.asarray(self.lengths) >= self.tables.capacity)
            if full.any():
                self._require_room(int(np.argmax(full)), 1)
        if self.checks_decodes:
            self._check_ids(decode.token_ids, "a decode row")
        if pieces and not self.family.has_mixed:
            raise ValueError(
                "this artifact has no mixed graph: decode and take in chunks in steps of their own, or export it with "
                "--batch-size 2 or more and without --no-mixed-step"
            )
        for piece in pieces:
            if piece.slot in slots:
                raise ValueError(f"slot {piece.slot} cannot decode and take a chunk in the same step")
        return longest

    def check_pieces(self, pieces: Sequence[PromptPiece]) -> None:
        sizes = self.config
        slots = [piece.slot for piece in pieces]
        rows = rows_needed((piece.count for piece in pieces), sizes.prefill_chunk_size)
        if not pieces or rows > sizes.ctx_batch_size or len(set(slots)) != len(slots):
            raise ValueError(
                f"a step takes 1 to ctx_batch_size={sizes.ctx_batch_size} rows of prefill_chunk_size="
                f"{sizes.prefill_chunk_size} tokens, each slot once, not {rows} rows of the slots {slots}"
            )
        for piece in pieces:
            if not 0 <= piece.slot < sizes.batch_size:
                raise ValueError(
                    f"slot {piece.slot} does not exist: the slots of batch_size={sizes.batch_size} start at 0"
                )
            count, start = piece.count, self.lengths[piece.slot]
            if count < 1:
                raise ValueError(f"the chunk of slot {piece.slot} has no token; give it at least 1")
            self._check_ids(piece.token_ids, f"the chunk of slot {piece.slot}")
            if start + count > sizes.sequence_length:
                raise ValueError(
                    f"slot {piece.slot} holds {start} tokens and cannot take {count} more: "
                    f"sequence_length={sizes.sequence_length}"
                )
            self._require_room(piece.slot, count)

    def select_graph(
        self, pieces: Sequence[PromptPiece], decode: DecodeRows | None, longest: int, graph: GraphSpec | None
    ) -> GraphSpec:
        """Return the graph of a step with decode rows that hold up to `longest` tokens each; `graph`, if that holds it."""
        context, blocks = 1, 0
        if decode is not None and self.family.in_place and self.tables is not None:
            blocks = self.tables.last_block(decode.active, np.asarray(self.lengths)) + 1
        elif decode is not None:
            context = longest + 1
        for piece in pieces:
            context = max(context, self.lengths[piece.slot] + piece.count)
        counts = [piece.count for piece in pieces]
        if graph is None:
            kind: GraphKind = "token_generation" if not pieces else "chunked_prefill" if decode is None else "mixed"
            return self.family.select(kind, context, counts, blocks)
        has_groups = graph.has_decode >= (decode is not None) and graph.has_chunk >= bool(pieces)
        if not has_groups or graph not in self.family or not holds(graph, context, counts, blocks):
            raise ValueError(
                f"the graph {graph.name} does not hold a step of prompt chunks of {counts} tokens at a context of {context}"
                f"{'' if decode is None else ' with decode rows'}"
            )
        return graph

    def _require_room(self, slot: int, count: int) -> None:
        if self.tables is None:
            return
        room = int(self.tables.capacity[slot])
        if self.lengths[slot] + count > room:
            raise ValueError(
                f"slot {slot} holds {self.lengths[slot]} tokens and has blocks for {room}: assign blocks for {count} more"
            )

    def _check_ids(self, token_ids: np.ndarray, what: str) -> None:
        if self.num_embeddings is not None:
            check_token_ids(token_ids, self.num_embeddings, what)
