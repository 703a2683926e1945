# SPDX-License-Identifier: Apache-2.0
"""The blocks of a cache: how many rows have each, and which tokens it contains. Knows nothing of requests or devices."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np


# The place before the first block of every prompt.
_ROOT = 0


class BlockMatch(NamedTuple):
    """What of a prompt is in the cache.

    Attributes:
        shared: full blocks that contain the prompt's first tokens, in order.
        source: a block whose first `common` tokens are those that follow; of no meaning where `common` is 0.
        ends: `source` contains nothing else.
    """

    shared: tuple[int, ...]
    source: int
    common: int
    ends: bool

    def first(self, length: int, block_length: int) -> BlockMatch:
        """What of it has the first `length` tokens."""
        full, rest = divmod(length, block_length)
        if not rest:
            return BlockMatch(self.shared[:full], 0, 0, False)
        if full < len(self.shared):
            return BlockMatch(self.shared[:full], self.shared[full], rest, False)
        return self._replace(common=rest)


NO_MATCH = BlockMatch((), 0, 0, False)


class BlockPool:
    """Blocks of a cache `[blocks, block_length]`.

    The contents of a block are the tokens whose keys and values other rows may use. They outlive the rows that had the
    block, until it is given to another one: blocks without contents go first, from the lowest number on, then those used
    least recently. Contents stand for all tokens before them too, so a block is found by the block that comes before it
    and by its own tokens, all of which are compared.

    Args:
        min_reuse: tokens that a part of a block must have to be copied.
    """

    def __init__(self, blocks: int, block_length: int, min_reuse: int) -> None:
        self.block_length = block_length
        self._min_reuse = min(max(1, min_reuse), block_length)
        self._references = [0] * blocks
        self._tokens = np.zeros((blocks, block_length), np.int32)
        self._lengths = np.zeros(blocks, np.int64)
        self._empty = list(range(blocks))
        self._kept: dict[int, None] = {}  # without references, with contents: least recently used first
        # A place is what the tokens of a full block, and of all before it, lead to.
        self._places = 1
        self._before = [_ROOT] * blocks
        self._behind = [_ROOT] * blocks
        self._full: dict[tuple[int, bytes], int] = {}
        # By the first tokens, as many as are reused at least.
        self._beginning: dict[tuple[int, bytes], dict[int, None]] = {}

    @property
    def free_count(self) -> int:
        """Blocks that no row has."""
        return len(self._empty) + len(self._kept)

    def references(self, block: int) -> int:
        """How many rows have a block."""
        return self._references[block]

    def length(self, block: int) -> int:
        """How many tokens a block contains."""
        return int(self._lengths[block])

    def contents(self, block: int) -> np.ndarray:
        """Tokens that others may use, int32 `[length]`."""
        return self._tokens[block, : self._lengths[block]].copy()

    def candidates(self) -> Iterator[int]:
        """Blocks that no row has, in the order in which they are given away."""
        yield from self._empty
        yield from self._kept

    def acquire(self, blocks: Sequence[int], *, fresh: bool) -> None:
        """Notes that one more row has these blocks.

        Args:
            fresh: they are to be written anew: no row has them, and their contents are void. Otherwise they are read.

        Raises:
            RuntimeError: a fresh block is another row's.
        """
        for block in blocks:
            if fresh:
                self.forget(block)
            if not self._references[block]:
                self._leave_free(block)
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Takes the blocks of a row back; the last ones are given away before those that they follow.

        Raises:
            RuntimeError: no row has one of them.
        """
        for block in reversed(blocks):
            if not self._references[block]:
                raise RuntimeError(f"block {block} is free and cannot be released")
            self._references[block] -= 1
            if not self._references[block]:
                self._join_free(block)

    def forget(self, block: int) -> None:
        """Voids the contents of a block that no row has.

        Raises:
            RuntimeError: a row has it.
        """
        if self._references[block]:
            raise RuntimeError(
                f"block {block} has {self._references[block]} rows that read it, and cannot be written anew"
            )
        if self._lengths[block]:
            self._leave_free(block)
            self._void(block)
            self._join_free(block)

    def clear(self) -> None:
        """Voids the contents of all blocks."""
        for block in np.flatnonzero(self._lengths).tolist():
            if self._references[block]:
                self._void(block)
            else:
                self.forget(block)

    def write(self, row: Sequence[int], start: int, tokens: np.ndarray | Sequence[int]) -> None:
        """Adds tokens to the contents of a row's blocks, behind what is in them.

        Args:
            row: its blocks, in order.
            start: place of the first token in the row.
        """
        end, place = start + len(tokens), start
        while place < end:
            index, offset = divmod(place, self.block_length)
            count = min(self.block_length - offset, end - place)
            before = self._behind[row[index - 1]] if index else _ROOT
            self._add(row[index], before, offset, tokens[place - start : place - start + count])
            place += count

    def match(self, prompt: np.ndarray, exclude: Collection[int] = ()) -> BlockMatch:
        """What of a prompt is in the cache but for its last token, whose logits choose the next one.

        Args:
            prompt: int32 `[n]`.
            exclude: blocks to leave out.
        """
        size, limit = self.block_length, len(prompt) - 1
        shared: list[int] = []
        place = _ROOT
        while (len(shared) + 1) * size <= limit:
            block = self._full.get((place, prompt[len(shared) * size : (len(shared) + 1) * size].tobytes()))
            if block is None or block in exclude:
                break
            shared.append(block)
            place = self._behind[block]
        return BlockMatch(tuple(shared), *self._part(place, prompt[len(shared) * size : limit], exclude))

    def _part(self, place: int, rest: np.ndarray, exclude: Collection[int]) -> tuple[int, int, bool]:
        """The block behind a place that shares the most tokens with `rest`."""
        if len(rest) < self._min_reuse:
            return 0, 0, False
        begins = self._beginning.get((place, rest[: self._min_reuse].tobytes()), ())
        blocks = [block for block in begins if block not in exclude]
        if not blocks:
            return 0, 0, False
        lengths = np.minimum(self._lengths[blocks], len(rest))
        columns = int(lengths.max())
        same = self._tokens[blocks, :columns] == rest[:columns]
        common = np.minimum(np.where(same.all(axis=1), columns, same.argmin(axis=1)), lengths)
        free = np.array([not self._references[block] for block in blocks])
        ends = free & (common == self._lengths[blocks])
        best = int(np.argmax(2 * common + ends))
        return blocks[best], int(common[best]), bool(ends[best])

    def touch(self, block: int) -> None:
        """Marks a block as the most recently used one."""
        if block in self._kept:
            del self._kept[block]
            self._kept[block] = None

    def _add(self, block: int, before: int, offset: int, tokens: np.ndarray | Sequence[int]) -> None:
        end = offset + len(tokens)
        self._before[block] = before
        self._tokens[block, offset:end] = tokens
        self._lengths[block] = end
        if offset < self._min_reuse <= end:
            self._beginning.setdefault(self._start_key(block), {})[block] = None
        if end == self.block_length:
            other = self._full.setdefault(self._key(block), block)
            if other == block:
                self._behind[block] = self._places
                self._places += 1
            else:  # two rows computed the same: what follows either is found behind both
                self._behind[block] = self._behind[other]

    def _void(self, block: int) -> None:
        if self._lengths[block] >= self._min_reuse:
            alike = self._beginning[self._start_key(block)]
            del alike[block]
            if not alike:
                del self._beginning[self._start_key(block)]
        if self._full.get(self._key(block)) == block:
            del self._full[self._key(block)]
        self._lengths[block] = 0
        self._behind[block] = _ROOT

    def _join_free(self, block: int) -> None:
        length = self._lengths[block]
        is_double = length == self.block_length and self._full.setdefault(self._key(block), block) != block
        if is_double or length < self._min_reuse:
            self._void(block)
        if self._lengths[block]:
            self._kept[block] = None
        else:
            insort(self._empty, block)

    def _leave_free(self, block: int) -> None:
        if block in self._kept:
            del self._kept[block]
        else:
            del self._empty[bisect_left(self._empty, block)]

    def _key(self, block: int) -> tuple[int, bytes]:
        return self._before[block], self._tokens[block].tobytes()

    def _start_key(self, block: int) -> tuple[int, bytes]:
        return self._before[block], self._tokens[block, : self._min_reuse].tobytes()
