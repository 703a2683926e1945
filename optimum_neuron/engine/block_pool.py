# SPDX-License-Identifier: Apache-2.0
"""The blocks of a cache: how many rows have each, and which tokens it contains."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np

from ..core import KeptState, Prefix, PromptPiece, Step
from .queues import RequestState


# The place before the first block of every prompt.
_ROOT = 0


# A shorter common prefix saves no step, and to copy it costs more than to compute it along with the rest.
MIN_REUSE = 16


class BlockPool:
    """Blocks of a cache `[blocks, block_length]`.

    The contents of a block are the tokens with keys and values that other rows may use. They outlive the rows that had the
    block, until another row gets it: blocks without contents go first, from the lowest number on, then the least recently
    used. Contents stand for all tokens before them too, so a block is found by the block before it and by its own tokens,
    all of which are compared.

    Args:
        min_reuse: tokens that a part of a block must have to be copied.
    """

    keeps_state = False  # next to blocks

    def __init__(self, blocks: int, block_length: int, min_reuse: int) -> None:
        self.block_length = block_length
        self._min_reuse = min(max(1, min_reuse), block_length)
        self._references = [0] * blocks
        self._tokens = np.zeros((blocks, block_length), np.int32)
        self._lengths = np.zeros(blocks, np.int64)
        # The same memory without numpy, for what happens for each token.
        self._cells, self._counts = self._tokens.data, self._lengths.data
        self._empty = list(range(blocks))
        self._kept: dict[int, None] = {}  # without references, with contents: least recently used first
        # A place is what the tokens of a full block, and of all before it, lead to.
        self._places = 1
        self._before = [_ROOT] * blocks
        self._after = [_ROOT] * blocks
        self._full: dict[tuple[int, bytes], int] = {}
        # By the first tokens, as many as are reused at least.
        self._beginning: dict[tuple[int, bytes], dict[int, None]] = {}

    @property
    def free_count(self) -> int:
        """Blocks that no row has."""
        return len(self._empty) + len(self._kept)

    def count_rows(self, block: int) -> int:
        """Return how many rows have a block."""
        return self._references[block]

    def list_free(self) -> Iterator[int]:
        """Yield blocks that no row has, in the order in which they are given away."""
        yield from self._empty
        yield from self._kept

    def acquire_blocks(self, blocks: Sequence[int], *, fresh: bool) -> None:
        """Give blocks to one more row, which reads them, or writes fresh ones: RuntimeError where another row has one of these."""
        for block in blocks:
            if fresh:
                self.forget_block(block)
            if not self._references[block]:
                self._leave_free(block)
            self._references[block] += 1

    def release_blocks(self, blocks: Sequence[int]) -> None:
        """Take back the blocks of a row; the last ones are given away before those that they follow."""
        for block in reversed(blocks):
            if not self._references[block]:
                raise RuntimeError(f"block {block} is free and cannot be released")
            self._references[block] -= 1
            if not self._references[block]:
                self._join_free(block)

    def forget_block(self, block: int) -> None:
        """Void the contents of a block; RuntimeError where a row has it."""
        if self._references[block]:
            raise RuntimeError(
                f"block {block} has {self._references[block]} rows that read it, and cannot be overwritten"
            )
        if self._lengths[block]:
            self._leave_free(block)
            self.void_block(block)
            self._join_free(block)

    def forget_all(self) -> None:
        """Void the contents of all blocks."""
        for block in np.flatnonzero(self._lengths).tolist():
            (self.void_block if self._references[block] else self.forget_block)(block)

    def write_tokens(self, row: Sequence[int], start: int, tokens: np.ndarray | Sequence[int]) -> None:
        """Add tokens to the contents of a row's blocks, from place `start` on; all before it are there."""
        end, place = start + len(tokens), start
        while place < end:
            index, offset = divmod(place, self.block_length)
            count = min(self.block_length - offset, end - place)
            before = self._after[row[index - 1]] if index else _ROOT
            self._add_tokens(row[index], before, offset, tokens[place - start : place - start + count])
            place += count

    def append_token(self, row: Sequence[int], place: int, token_id: int) -> None:
        """Add one token, as `write_tokens` does."""
        size = self.block_length
        offset = place % size
        end = offset + 1
        if offset and end != self._min_reuse and end != size:  # the block is found as before
            block = row[place // size]
            self._cells[block, offset] = token_id
            self._counts[block] = end
        else:
            self.write_tokens(row, place, (token_id,))

    def match_prompt(self, prompt: np.ndarray, exclude: Collection[int] = ()) -> Prefix:
        """Return what the cache holds of a prompt `[n]` int32, without its last token, which chooses the next one, but for some blocks."""
        size, limit = self.block_length, len(prompt) - 1
        full: list[int] = []
        place = _ROOT
        while (len(full) + 1) * size <= limit:
            block = self._full.get((place, prompt[len(full) * size : (len(full) + 1) * size].tobytes()))
            if block is None or block in exclude:
                break
            full.append(block)
            place = self._after[block]
        start = len(full) * size
        source, common, ends = self._match_part(place, prompt[start:], exclude)
        return Prefix(start + common, tuple(full), source, ends)

    def _match_part(self, place: int, rest: np.ndarray, exclude: Collection[int]) -> tuple[int | None, int, bool]:
        """Return the block after a place that shares the most tokens with `rest`, their number, and whether it ends with them.

        Of equals, one that ends with them comes first, then the lowest. A block that ends with the last token of `rest` counts as
        such: that token is computed once more. A full block does not, as others may follow it.
        """
        if len(rest) <= self._min_reuse:
            return None, 0, False
        begins = self._beginning.get((place, rest[: self._min_reuse].tobytes()), ())
        blocks = sorted(block for block in begins if block not in exclude)
        if not blocks:
            return None, 0, False
        lengths = np.minimum(self._lengths[blocks], len(rest))
        columns = int(lengths.max())
        same = self._tokens[blocks, :columns] == rest[:columns]
        common = np.minimum(np.where(same.all(axis=1), columns, same.argmin(axis=1)), lengths)
        free = np.array([not self._references[block] for block in blocks])
        ends = free & (common == self._lengths[blocks]) & (common < self.block_length)
        best = int(np.argmax(2 * common + ends))
        return blocks[best], min(int(common[best]), len(rest) - 1), bool(ends[best])

    def touch_block(self, block: int) -> None:
        """Mark a block as the most recently used one."""
        if block in self._kept:
            del self._kept[block]
            self._kept[block] = None

    def plan_states(self, pieces: Sequence[PromptPiece], live: Mapping[str, RequestState]) -> tuple[KeptState, ...]:
        """Return the state that is kept after a step with these pieces of prompts."""
        return ()

    def follow_step(self, step: Step, live: Callable[[KeptState], RequestState | None]) -> None:
        """Note what a step used. `live` returns the request of a copy; None where it was aborted since."""
        for copy in step.copies:
            self.touch_block(copy.source)

    def _add_tokens(self, block: int, before: int, offset: int, tokens: np.ndarray | Sequence[int]) -> None:
        end = offset + len(tokens)
        self._before[block] = before
        self._tokens[block, offset:end] = tokens
        self._lengths[block] = end
        if offset < self._min_reuse <= end:
            self._beginning.setdefault(self._start_key(block), {})[block] = None
        if end == self.block_length:
            other = self._full.setdefault(self._full_key(block), block)
            if other == block:
                self._after[block] = self._places
                self._places += 1
            else:  # two rows computed the same: what follows either is found after both
                self._after[block] = self._after[other]

    def void_block(self, block: int) -> None:
        """Void the contents of a block, whoever has it."""
        if self._lengths[block] >= self._min_reuse:
            alike = self._beginning[self._start_key(block)]
            del alike[block]
            if not alike:
                del self._beginning[self._start_key(block)]
        if self._full.get(self._full_key(block)) == block:
            del self._full[self._full_key(block)]
        self._lengths[block] = 0
        self._after[block] = _ROOT

    def _join_free(self, block: int) -> None:
        length = self._lengths[block]
        is_double = length == self.block_length and self._full.setdefault(self._full_key(block), block) != block
        if is_double or length < self._min_reuse:
            self.void_block(block)
        if self._lengths[block]:
            self._kept[block] = None
        else:
            insort(self._empty, block)

    def _leave_free(self, block: int) -> None:
        if block in self._kept:
            del self._kept[block]
        else:
            del self._empty[bisect_left(self._empty, block)]

    def _full_key(self, block: int) -> tuple[int, bytes]:
        return self._before[block], self._tokens[block].tobytes()

    def _start_key(self, block: int) -> tuple[int, bytes]:
        return self._before[block], self._tokens[block, : self._min_reuse].tobytes()
