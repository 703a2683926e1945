# SPDX-License-Identifier: Apache-2.0
"""The step graphs with their input arrays, which each step fills; decode rows; and outputs that outlive the next run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..core import PromptPiece, StepOutput
from ..step.block_owners import BlockOwners, OwnerSizes, fill_owners
from ..step.spec import BLOCK_TABLE, CHUNK, DECODE, GREEDY, WRITE_BLOCKS, GraphSpec, TensorSpec
from .block_tables import BlockTables


IDLE = -1
# In place of a token: the one that its slot chose last, which is on the device.
FROM_SLOT = -1


class DecodeRows(NamedTuple):
    """One token for each active slot. All arrays have a row per slot.

    Attributes:
        token_ids: `[batch_size]` int32, tokens to process; FROM_SLOT takes the one that the slot chose last, where
            `GraphRunner.runs_ahead`.
        active: `[batch_size]` bool; other slots stay as they are.
        sampling_params: `[batch_size, 4]` float32, a `SamplingParams` per row; ignored without on-device sampling.
        uniforms: `[batch_size]` float32 in [0, 1); ignored without on-device sampling.
    """

    token_ids: np.ndarray
    active: np.ndarray
    sampling_params: np.ndarray
    uniforms: np.ndarray

    def list_slots(self) -> list[int]:
        """Return the active slots."""
        return [slot for slot, active in enumerate(self.active.tolist()) if active]


def copy_output(output: StepOutput) -> StepOutput:
    """Return an output in memory that the next run leaves alone."""
    return StepOutput(*(each if each is None else each.copy() for each in output))


def join_outputs(parts: Sequence[tuple[np.ndarray, StepOutput]]) -> StepOutput:
    """Return one output of a step's runs, each with the decode rows that were active in it."""
    (_, whole), *others = parts
    tokens, logits = (None if each is None else each.copy() for each in whole.of_group(DECODE))
    for active, output in others:
        for own, other in zip((tokens, logits), output.of_group(DECODE), strict=True):
            if own is not None and other is not None:
                own[active] = other[active]
    return whole._replace(decode_tokens=tokens, decode_logits=logits)


# Input arrays of all graphs, kept between steps: graphs that take one of the same name and shape share it.
InputArrays = dict[TensorSpec, np.ndarray]


class GroupInputs:
    """Input arrays of one row group of a graph, with the owners of blocks where decode rows attend in place."""

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        arrays: InputArrays,
        tables: BlockTables | None,
        owners: OwnerSizes | None = None,
    ) -> None:
        for spec in specs:
            if spec not in arrays:
                arrays[spec] = np.zeros(spec.shape, spec.dtype)
        self.arrays = [arrays[spec] for spec in specs]
        self._tables = tables
        self._owners = owners
        views = {spec.name.split(".")[1]: each for spec, each in zip(specs, self.arrays, strict=True)}
        self._owner_views = {name: views[name] for name in BlockOwners._fields if name in views}
        self._block_table: np.ndarray = views.get(BLOCK_TABLE, np.empty((0, 0), np.int32))
        self._write_blocks: np.ndarray = views.get(WRITE_BLOCKS, np.empty((0, 0), np.int32))
        self.input_ids: np.ndarray = views["input_ids"]
        self.position_ids: np.ndarray = views["position_ids"]
        self.seq_ids: np.ndarray | None = views.get("seq_ids")
        self.sampling_params: np.ndarray | None = views.get("sampling_params")
        self.uniforms: np.ndarray | None = views.get("uniforms")
        self.position_ids.fill(IDLE)
        # Rows of one token without numpy: after a step its code has left the processor's caches.
        self._ids, self._positions = (each.reshape(-1).data for each in (self.input_ids, self.position_ids))
        self._idle = self.position_ids.reshape(-1).copy().data

    def fill_decode(self, rows: DecodeRows | None, slots: Sequence[int], lengths: memoryview) -> None:
        """Set the rows of a step, those of `slots`, or make all of them idle; `lengths` has a number for each slot.

        Raises TooManySharedBlocksError if more blocks have several owners than the graph has places for; ValueError
        if rows that attend in place share a block that is not at one place of their texts.
        """
        if self._tables is not None:
            self._fill_tables(self._tables, False if rows is None else rows.active, np.asarray(lengths))
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

    def _fill_tables(self, tables: BlockTables, active: np.ndarray | bool, held: np.ndarray) -> None:
        if self._owners is not None:
            fill_owners(self._owner_views, self._owners, tables.blocks, tables.read_blocks(active, held))
        else:
            self._block_table[:] = tables.blocks[:, : self._block_table.shape[1]]
        block = np.where(active, held, 0) // tables.block_length
        self._write_blocks[:, 0] = np.take_along_axis(tables.blocks, block[:, None], axis=1)[:, 0]

    def fill_pieces(self, pieces: Sequence[PromptPiece], lengths: memoryview) -> list[int]:
        """Cut pieces into rows; return the row of each piece's last token."""
        assert self.seq_ids is not None
        self.position_ids.fill(IDLE)
        if self.sampling_params is not None:
            self.sampling_params[:] = GREEDY
        size = self.input_ids.shape[1]
        row, last_rows = 0, []
        for piece in pieces:
            start, count = lengths[piece.slot], piece.count
            for offset in range(0, count, size):
                real = min(size, count - offset)
                self.input_ids[row, :real] = piece.token_ids[offset : offset + real]
                self.input_ids[row, real:] = piece.token_ids[offset + real - 1]
                self.position_ids[row, :real] = np.arange(start + offset, start + offset + real)
                self.position_ids[row, real:] = start + offset + real - 1
                self.seq_ids[row] = piece.slot
                if self._tables is not None:
                    blocks = self._tables.blocks[piece.slot]
                    self._block_table[row] = blocks[: self._block_table.shape[1]]
                    self._write_blocks[row] = blocks[self.position_ids[row] // self._tables.block_length]
                row += 1
            last_rows.append(row - 1)
            if self.sampling_params is not None and self.uniforms is not None:
                self.sampling_params[row - 1] = piece.sampling
                self.uniforms[row - 1] = piece.uniform
        return last_rows


class StepGraph:
    """A graph with its input arrays, the same in every step, and what a step needs to know of it, found once."""

    def __init__(self, graph: GraphSpec, arrays: InputArrays, tables: BlockTables | None) -> None:
        self.name = graph.name
        specs = graph.inputs()
        groups = {
            group: GroupInputs(
                [spec for spec in specs if spec.name.startswith(f"{group}.")],
                arrays,
                tables,
                graph.owner_sizes if group == DECODE else None,
            )
            for group, present in ((DECODE, graph.has_decode), (CHUNK, graph.has_chunk))
            if present
        }
        self._decode, self._chunk = groups.get(DECODE), groups.get(CHUNK)
        self.inputs: list[np.ndarray] = [array for group in groups.values() for array in group.arrays]
        # StepOutput's fields have the names of a graph's outputs. After these there is one more: None.
        names = [each.name.replace(".", "_") for each in graph.outputs(1)]
        self._count = len(names)
        self._chunk_size = graph.chunk_size
        self._places = [names.index(name) if name in names else len(names) for name in StepOutput._fields]

    def fill_inputs(
        self, pieces: Sequence[PromptPiece], decode: DecodeRows | None, slots: Sequence[int], lengths: memoryview
    ) -> list[int]:
        """Set the inputs of a step, or make all rows idle; return the row of each piece's last token.

        Arguments and errors are those of `GroupInputs.fill_decode`.
        """
        if self._decode is not None:
            self._decode.fill_decode(decode, slots, lengths)
        return [] if self._chunk is None else self._chunk.fill_pieces(pieces, lengths)

    def name_outputs(self, outputs: Sequence[np.ndarray | None], last_rows: list[int]) -> StepOutput:
        """Return a run's outputs by name, with `last_rows` of `fill_inputs`; raise ValueError for more or fewer than the graph's."""
        if len(outputs) != self._count:
            raise ValueError(f"graph {self.name} returned {len(outputs)} outputs, and has {self._count}")
        decode_tokens, decode_logits, chunk_tokens, chunk_logits, prompt_logits = self._places
        every = (*outputs, None)
        output = StepOutput(every[decode_tokens], every[decode_logits], every[chunk_tokens], every[chunk_logits])
        scored = every[prompt_logits]
        if scored is not None:
            output = output._replace(prompt_logits=scored.reshape(-1, self._chunk_size, scored.shape[-1]))
        if last_rows and last_rows != list(range(len(last_rows))):
            tokens, logits = (each if each is None else each[last_rows] for each in output.of_group(CHUNK))
            return output._replace(chunk_tokens=tokens, chunk_logits=logits)
        return output
