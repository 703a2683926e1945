# SPDX-License-Identifier: Apache-2.0
"""What no graph may be given: refused in one sentence before any slot is touched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..config import NeuronConfig
from ..step.family import rows_needed
from .block_tables import BlockTables
from .step_tensors import Chunk, DecodeRows
from .token_ids import check_token_ids


@dataclass(frozen=True)
class StepChecks:
    """Checks the parts of a step against the state of the slots. All methods raise ValueError, and change nothing.

    Attributes:
        lengths, tables: the runner's; lengths as Python has numbers.
        num_embeddings: token ids that the model takes; None: they are not checked.
        checks_decodes: whether tokens that the model chose are checked, too.
    """

    config: NeuronConfig
    lengths: memoryview
    tables: BlockTables | None
    has_mixed: bool
    num_embeddings: int | None
    checks_decodes: bool

    def decode(self, decode: DecodeRows, slots: Sequence[int], chunks: Sequence[Chunk]) -> int:
        """Decode rows, of these slots, beside chunks; returns how many tokens the longest of them holds."""
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
            self._ids(decode.token_ids, "a decode row")
        if chunks and not self.has_mixed:
            raise ValueError(
                "this artifact has no mixed graph: decode and take in chunks in steps of their own, or export it with "
                "--batch-size 2 or more and without --no-mixed-step"
            )
        for chunk in chunks:
            if chunk.slot in slots:
                raise ValueError(f"slot {chunk.slot} cannot decode and take a chunk in the same step")
        return longest

    def chunks(self, chunks: Sequence[Chunk]) -> None:
        """Chunks, by themselves."""
        sizes = self.config
        slots = [chunk.slot for chunk in chunks]
        rows = rows_needed((len(chunk.token_ids) for chunk in chunks), sizes.prefill_chunk_size)
        if not chunks or rows > sizes.ctx_batch_size or len(set(slots)) != len(slots):
            raise ValueError(
                f"a step takes 1 to ctx_batch_size={sizes.ctx_batch_size} rows of prefill_chunk_size="
                f"{sizes.prefill_chunk_size} tokens, each slot once, not {rows} rows of the slots {slots}"
            )
        for chunk in chunks:
            if not 0 <= chunk.slot < sizes.batch_size:
                raise ValueError(
                    f"slot {chunk.slot} does not exist: the slots of batch_size={sizes.batch_size} start at 0"
                )
            count, start = len(chunk.token_ids), self.lengths[chunk.slot]
            if count < 1:
                raise ValueError(f"the chunk of slot {chunk.slot} has no token; give it at least 1")
            self._ids(chunk.token_ids, f"the chunk of slot {chunk.slot}")
            if start + count > sizes.sequence_length:
                raise ValueError(
                    f"slot {chunk.slot} holds {start} tokens and cannot take {count} more: "
                    f"sequence_length={sizes.sequence_length}"
                )
            self._require_room(chunk.slot, count)

    def _require_room(self, slot: int, count: int) -> None:
        if self.tables is None:
            return
        room = int(self.tables.capacity[slot])
        if self.lengths[slot] + count > room:
            raise ValueError(
                f"slot {slot} holds {self.lengths[slot]} tokens and has blocks for {room}: assign blocks for {count} more"
            )

    def _ids(self, token_ids: np.ndarray, whose: str) -> None:
        if self.num_embeddings is not None:
            check_token_ids(token_ids, self.num_embeddings, whose)
