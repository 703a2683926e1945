# SPDX-License-Identifier: Apache-2.0
"""What a step is given and gives, by slot and chunk; and the graphs' input tensors, which are filled with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..step.features.shared_blocks.block_owners import BlockOwners, OwnerSizes, fill_owners
from ..step.spec import BLOCK_TABLE, DECODE, GREEDY, WRITE_BLOCKS, SamplingParams, TensorSpec
from .block_tables import BlockTables


IDLE = -1
# In place of a token: the one that its slot chose last, which is on the device.
FROM_SLOT = -1


@dataclass(frozen=True)
class Chunk:
    """The next prompt tokens of one slot: at least one; a chunk longer than a graph's rows takes several of them."""

    slot: int
    token_ids: np.ndarray
    sampling: SamplingParams = GREEDY
    uniform: float = 0.0


def chunks_of(slot: int, token_ids: np.ndarray, size: int) -> list[Chunk]:
    """Cut a prompt into chunks of up to `size` tokens, each for a step of its own."""
    return [Chunk(slot, token_ids[start : start + size]) for start in range(0, len(token_ids), size)]


class DecodeRows(NamedTuple):
    """One token for each active slot. All arrays have a row per slot.

    `token_ids [batch_size]` int32 are the tokens to process, FROM_SLOT in place of the one that its slot chose last where
    `GraphRunner.runs_ahead`, `active [batch_size]` bool leaves the other slots alone,
    `sampling_params [batch_size, 4]` float32 are a `SamplingParams` per row and `uniforms [batch_size]` float32 in
    [0, 1); both are ignored without on-device sampling.
    """

    token_ids: np.ndarray
    active: np.ndarray
    sampling_params: np.ndarray
    uniforms: np.ndarray

    def slots(self) -> list[int]:
        """Those that are active."""
        return [slot for slot, active in enumerate(self.active.tolist()) if active]


class StepOutput(NamedTuple):
    """Per row: the token that the on-device sampler chose, and logits; None where the graph does not return them, or nobody asked.

    Decode rows are slots. Chunk rows are in the order of the step's chunks and stand for the last token of each. `prompt_logits`
    `[rows, tokens, vocab]` are of a scoring graph's chunk rows. Who keeps any of it copies it: the next run, of whichever graph, may use its memory again.
    """

    decode_tokens: Tensor | None = None
    decode_logits: Tensor | None = None
    chunk_tokens: Tensor | None = None
    chunk_logits: Tensor | None = None
    prompt_logits: Tensor | None = None

    def of(self, group: str) -> tuple[Tensor | None, Tensor | None]:
        """Tokens and logits of a group of rows."""
        decodes = self.decode_tokens, self.decode_logits
        return decodes if group == DECODE else (self.chunk_tokens, self.chunk_logits)

    def of_prompts(self, chunks: Sequence[Chunk]) -> list[Tensor]:
        """Of a scoring graph, the logits of all tokens of each of its step's chunks, `[tokens, vocab]`."""
        assert self.prompt_logits is not None
        size = self.prompt_logits.shape[1]
        counts = [len(chunk.token_ids) for chunk in chunks]
        rows = [-(-count // size) for count in counts]
        parts = self.prompt_logits[: sum(rows)].split(rows)
        return [part.flatten(0, 1)[:count] for part, count in zip(parts, counts, strict=True)]


class TokenReader:
    """Tokens as Python has them. Where they are in the same tensor as the last time, they are read without torch."""

    def __init__(self) -> None:
        self._tensor: Tensor | None = None
        self._view = memoryview(b"")

    def read(self, tokens: Tensor) -> list[int]:
        """`tokens [rows]`."""
        if tokens is not self._tensor:
            self._tensor, self._view = tokens, tokens.numpy().data
        return self._view.tolist()


def kept(output: StepOutput) -> StepOutput:
    """An output of which the next run leaves the memory alone."""
    return StepOutput(*(each if each is None else each.clone() for each in output))


def together(parts: Sequence[tuple[np.ndarray, StepOutput]]) -> StepOutput:
    """One output of a step's runs, each with the decode rows that were active in it."""
    (_, whole), *others = parts
    tokens, logits = (None if each is None else each.clone() for each in whole.of(DECODE))
    for active, output in others:
        for own, other in zip((tokens, logits), output.of(DECODE), strict=True):
            if own is not None and other is not None:
                own[active] = other[active]
    return whole._replace(decode_tokens=tokens, decode_logits=logits)


class InputTensors:
    """Input tensors of all graphs, kept between steps: graphs that take a tensor of one name and shape share it."""

    def __init__(self) -> None:
        self._tensors: dict[TensorSpec, Tensor] = {}

    def of(self, specs: Sequence[TensorSpec]) -> list[Tensor]:
        """The tensors of some specs, zeroed where they are new."""
        for spec in specs:
            if spec not in self._tensors:
                self._tensors[spec] = torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))
        return [self._tensors[spec] for spec in specs]


class GroupInputs:
    """Input tensors of one row group of a graph; numpy views of their memory are cheap to fill.

    Args:
        tables: of a cache of blocks, those that rows have; None without.
        owners: of rows whose blocks attend in place, what the graph is told of their owners.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        tensors: InputTensors,
        tables: BlockTables | None,
        owners: OwnerSizes | None = None,
    ) -> None:
        self.tensors = tensors.of(specs)
        self._tables = tables
        self._owners = owners
        views = {spec.name.split(".")[1]: t.numpy() for spec, t in zip(specs, self.tensors, strict=True)}
        self._told = {name: views[name] for name in BlockOwners._fields if name in views}
        self._block_table: np.ndarray = views.get(BLOCK_TABLE, np.empty((0, 0), np.int32))
        self._write_blocks: np.ndarray = views.get(WRITE_BLOCKS, np.empty((0, 0), np.int32))
        self.input_ids: np.ndarray = views["input_ids"]
        self.position_ids: np.ndarray = views["position_ids"]
        self.seq_ids: np.ndarray | None = views.get("seq_ids")
        self.sampling_params: np.ndarray | None = views.get("sampling_params")
        self.uniforms: np.ndarray | None = views.get("uniforms")
        self.position_ids.fill(IDLE)
        # Rows of one token without numpy, whose code has left the processor's caches behind a step.
        self._ids, self._positions = (each.reshape(-1).data for each in (self.input_ids, self.position_ids))
        self._idle = self.position_ids.reshape(-1).copy().data

    def fill_decode(self, rows: DecodeRows | None, slots: Sequence[int], lengths: memoryview) -> None:
        """Sets the rows of a step, or that all idle.

        Args:
            slots: of the rows that do not.
            lengths: of all slots.

        Raises:
            TooManySharedBlocksError: more blocks have several owners than the graph has places for.
            ValueError: rows that attend in place share a block that is not at one place of their texts.
        """
        if self._tables is not None:
            self._fill_tables(self._tables, np.zeros(len(lengths), bool) if rows is None else rows.active, lengths)
        ids, positions = self._ids, self._positions
        positions[:] = self._idle
        if rows is None:
            return
        tokens = rows.token_ids.tolist()
        for slot in slots:
            ids[slot] = tokens[slot]
            positions[slot] = lengths[slot]
        if self.sampling_params is not None and self.uniforms is not None:
            self.sampling_params[:] = rows.sampling_params
            self.uniforms[:] = rows.uniforms

    def _fill_tables(self, tables: BlockTables, active: np.ndarray, lengths: memoryview) -> None:
        """Tells decode rows where their blocks are, and who shares those that attend in place."""
        held = np.asarray(lengths)
        if self._owners is not None:
            fill_owners(self._told, self._owners, tables.blocks, tables.read_blocks(active, held))
        else:
            self._block_table[:] = tables.blocks[:, : self._block_table.shape[1]]
        block = np.where(active, held, 0) // tables.block_length
        self._write_blocks[:, 0] = np.take_along_axis(tables.blocks, block[:, None], axis=1)[:, 0]

    def fill_chunks(self, chunks: Sequence[Chunk], lengths: memoryview) -> list[int]:
        """Cuts chunks into rows; returns the row of each chunk's last token."""
        assert self.seq_ids is not None
        self.position_ids.fill(IDLE)
        if self.sampling_params is not None:
            self.sampling_params[:] = GREEDY
        size = self.input_ids.shape[1]
        row, last_rows = 0, []
        for chunk in chunks:
            start, count = lengths[chunk.slot], len(chunk.token_ids)
            for offset in range(0, count, size):
                real = min(size, count - offset)
                self.input_ids[row, :real] = chunk.token_ids[offset : offset + real]
                self.input_ids[row, real:] = chunk.token_ids[offset + real - 1]
                self.position_ids[row, :real] = np.arange(start + offset, start + offset + real)
                self.position_ids[row, real:] = start + offset + real - 1
                self.seq_ids[row] = chunk.slot
                self._fill_blocks(row, chunk.slot)
                row += 1
            last_rows.append(row - 1)
            if self.sampling_params is not None and self.uniforms is not None:
                self.sampling_params[row - 1] = chunk.sampling
                self.uniforms[row - 1] = chunk.uniform
        return last_rows

    def _fill_blocks(self, row: int, slot: int) -> None:
        if self._tables is not None:
            blocks = self._tables.blocks[slot]
            self._block_table[row] = blocks[: self._block_table.shape[1]]
            self._write_blocks[row] = blocks[self.position_ids[row] // self._tables.block_length]
