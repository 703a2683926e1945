# SPDX-License-Identifier: Apache-2.0
"""Sizes that follow from the options of a NeuronConfig."""

from __future__ import annotations

from .graph_options import HLO_TARGETS, INT4_GROUP_SIZES, GraphOptions


# Targets with kernels that advance the state of a recurrence token by token; the others compute in blocks.
WALKING_TARGETS: tuple[str, ...] = ("cpu",)
# Tokens of a block of a recurrence, at most: within one, work grows with its square; between two, the state is read and written.
LARGEST_SCAN_BLOCK = 64
# One block in so many attends with all rows' queries. Each costs a step as much memory traffic as a block that attends in place and,
# with 128 rows, 128 times its arithmetic. On trn2 all of them together are 3% of what a decode step of Llama-3.1-8B reads.
BLOCKS_PER_SHARED = 32


class GraphSizes(GraphOptions):
    """The derived sizes of a NeuronConfig, in tokens where nothing else is said."""

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        """All compiled chunk sizes, ascending; the last one is `prefill_chunk_size`."""
        return (*self.prefill_chunk_buckets, self.prefill_chunk_size)

    @property
    def prompt_capacity(self) -> int:
        """Prompt tokens that one run of a graph takes in, at most."""
        return self.ctx_batch_size * self.prefill_chunk_size

    @property
    def step_capacity(self) -> int:
        """Tokens that one run of a graph holds, at most: full chunk rows, and a token of every decode row."""
        return self.batch_size + self.prompt_capacity

    @property
    def scan_block(self) -> int | None:
        """Tokens of a block of a recurrence, one power of two for all graphs; None where the target walks token by token."""
        if self.target in WALKING_TARGETS:
            return None
        return min(LARGEST_SCAN_BLOCK, max(2, 1 << (self.prefill_chunk_size.bit_length() - 1)))

    @property
    def int4_group_size(self) -> int:
        """Inputs that share a scale, where weights are rounded to int4."""
        return self.quantization_group_size or INT4_GROUP_SIZES[0]

    @property
    def block_length(self) -> int:
        """Tokens of a block of the cache; a slot is one block."""
        return self.kv_block_size or self.sequence_length

    @property
    def kv_blocks(self) -> int:
        """Blocks that requests can have together."""
        if self.kv_block_size is None:
            return self.batch_size
        return (self.kv_cache_tokens or self.batch_size * self.sequence_length) // self.kv_block_size

    @property
    def blocks_per_row(self) -> int:
        """Blocks of the longest request."""
        return self.sequence_length // self.block_length

    def blocks_of(self, tokens: int) -> int:
        """Return the number of blocks that hold so many tokens of a row."""
        return -(-tokens // self.block_length)

    @property
    def trash_blocks(self) -> int:
        """Blocks after the others, where padding is written: each token of a step has a place of its own there."""
        return self.blocks_of(self.step_capacity)

    @property
    def blocks_in_place(self) -> bool:
        """True where decode rows attend over blocks in place: on devices, to gather them costs as much as to read them twice."""
        return self.kv_block_size is not None and self.target in HLO_TARGETS

    @property
    def shared_blocks(self) -> int:
        """Blocks with several owners that one run of a graph has places for, where blocks attend in place."""
        if self.batch_size == 1 or not self.blocks_in_place:
            return 0
        return -(-self.kv_blocks // BLOCKS_PER_SHARED)

    @property
    def returns_decode_logits(self) -> bool:
        """True where decode rows return logits: asked for, needed to choose a token, or on the host for log-probabilities."""
        read_on_host = self.top_logprobs is not None and self.target not in HLO_TARGETS
        return self.output_logits or not self.on_device_sampling or read_on_host
