# SPDX-License-Identifier: Apache-2.0
"""Blocks of the rows of recorded steps: anywhere, other ones in each step, and some of them shared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ...step.block_owners import BlockOwners, fill_owners
from ...step.spec import BLOCK_TABLE, CHUNK, DECODE, WRITE_BLOCKS, GraphSpec


def gathered_spec(spec: GraphSpec) -> GraphSpec:
    """Return a graph's step as the reference runs it: rows gather the blocks of their tables, of any number."""
    if spec.kv_block_size is None:
        return spec
    return replace(spec, blocks_in_place=0, shared_blocks=0, context_length=spec.sequence_length)


class RandomBlocks:
    """Blocks of the rows of one step: any, as every block of the cache holds numbers before the first step."""

    def __init__(self, spec: GraphSpec, random: np.random.Generator) -> None:
        assert spec.kv_block_size is not None
        self._spec, self._length = spec, spec.kv_block_size
        # `[slots, row_blocks]`; after a row's last block, block 0.
        self.tables = np.zeros((spec.batch_size, spec.sequence_length // self._length), np.int32)
        # Of decode rows by slot; lower than asked for where blocks are few, without rows that got none.
        self.positions: dict[int, int] = {}
        self._free = [int(block) for block in random.permutation(spec.kv_blocks)]

    def give_chunks(self, ends: Mapping[int, int]) -> None:
        for slot, end in ends.items():
            needed = -(-end // self._length)
            self.tables[slot, :needed] = [self._free.pop() for _ in range(needed)]

    def give_decodes(self, positions: Mapping[int, int]) -> None:
        """Give decode rows blocks that the graph reads; the second row shares full ones of the first, where it may."""
        free = [block for block in self._free if block < (self._spec.blocks_in_place or self._spec.kv_blocks)]
        waiting = len(positions)
        first: int | None = None
        for number, (slot, position) in enumerate(positions.items()):
            waiting -= 1
            shared = 0
            if number == 1 and first is not None:
                shared = min(self._spec.shared_blocks, self.positions[first] // self._length, position // self._length)
                self.tables[slot, :shared] = self.tables[first, :shared]
            own = min(position // self._length + 1 - shared, max(len(free) - waiting, 1), len(free))
            if own < 1:
                self.tables[slot] = 0
                continue
            self.tables[slot, shared : shared + own] = [free.pop() for _ in range(own)]
            self.positions[slot] = min(position, (shared + own) * self._length - 1)
            first = slot if number == 0 else first

    def write_inputs(self, inputs: Mapping[str, Tensor], spec: GraphSpec) -> None:
        """Set the block inputs of `spec` in inputs that have their positions."""
        if spec.has_decode:
            positions = inputs[f"{DECODE}.position_ids"].numpy()
            if spec.owner_sizes is None:
                inputs[f"{DECODE}.{BLOCK_TABLE}"].copy_(torch.from_numpy(self.tables))
            else:
                owners = {name: inputs[f"{DECODE}.{name}"].numpy() for name in spec.owner_sizes.shapes()}
                assert owners.keys() <= set(BlockOwners._fields)
                fill_owners(owners, spec.owner_sizes, self.tables, -(-positions[:, 0].clip(0) // self._length))
            self._write_blocks(inputs[f"{DECODE}.{WRITE_BLOCKS}"], self.tables, positions)
        if spec.has_chunk:
            tables = self.tables[inputs[f"{CHUNK}.seq_ids"].numpy()]
            table = inputs[f"{CHUNK}.{BLOCK_TABLE}"]
            table.copy_(torch.from_numpy(tables[:, : table.shape[1]]))
            self._write_blocks(inputs[f"{CHUNK}.{WRITE_BLOCKS}"], tables, inputs[f"{CHUNK}.position_ids"].numpy())

    def _write_blocks(self, blocks: Tensor, tables: np.ndarray, positions: np.ndarray) -> None:
        blocks.copy_(torch.from_numpy(np.take_along_axis(tables, positions.clip(0) // self._length, axis=1)))
