# SPDX-License-Identifier: Apache-2.0
"""The steps that a certificate executes: made of sizes and a seed alone, so that any machine makes the same.

Slots begin with a history of numbers in every column, so that one step near the end of its context tries all columns that
it may see and must not see, also those of a window; a prompt as long as the context would cost thousands of times as much.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...step.spec import CHUNK, DECODE, GREEDY, PROMPT, GraphSpec, SamplingParams, TensorSpec
from ...targets.neuron.copy_graphs import COPY_INPUTS
from ...targets.neuron.graph_io import COPY_SLOT, KEEP_STATE, RESTORE_STATE
from .random_blocks import RandomBlocks, gathered


_SAMPLED = SamplingParams(8, 0.9, 0.8)
_IDLE = -1
_DECODE_IDS, _FROM_SLOTS = f"{DECODE}.input_ids", slice(0, None, 2)
# Whole numbers of so many bits are exact in every type of a cache.
_LARGEST_LEVEL = 127


@dataclass(frozen=True)
class Step:
    """One run of a graph.

    Attributes:
        inputs: by name, in the graph's order.
        rows: by group of rows, those whose results are somebody's; as PROMPT, tokens of all chunk rows, numbered through.
        written: slot and column of each token that the step writes; of a cache of blocks, block and column.
        by_table: inputs of the same step where rows gather the blocks of their tables; None: as they are.
        kept: `[slots]` int32, what slots chose before, as far as the graph is told; None where the host chooses tokens.
    """

    graph: str
    inputs: Mapping[str, Tensor]
    rows: Mapping[str, tuple[int, ...]]
    written: tuple[tuple[int, int], ...]
    kept: Tensor | None = None
    by_table: Mapping[str, Tensor] | None = None

    def given(self) -> dict[str, Tensor]:
        """The inputs as a graph gets them: every other decode row is to take the token that its slot chose."""
        if self.kept is None or _DECODE_IDS not in self.inputs:
            return dict(self.inputs)
        ids = self.inputs[_DECODE_IDS].clone()
        ids[_FROM_SLOTS] = -1
        return {**self.inputs, _DECODE_IDS: ids}


def drawn(tokens: str) -> str:
    """What the tokens of a sampler are called beside those that its step chose, of whose name this is made."""
    return tokens.replace(".tokens", ".drawn")


def chosen_tokens(step: Step) -> Tensor:
    """Tokens of decode rows whose log-probabilities are asked for: any will do, and each row's own one is known."""
    return step.inputs[_DECODE_IDS][:, 0].contiguous()


def record_steps(
    graphs: Sequence[GraphSpec], token_ids: int, copies: Collection[str], snapshots: int
) -> tuple[Step, ...]:
    """The steps of all graphs, in the order in which they run.

    Per graph with chunks: a prompt that ends within a chunk, its continuation off the chunks' boundaries beside other rows of
    the same prompt where there are several, a chunk at the end of the context, and one of a single token. Decode rows follow
    these prompts, stand at the end of the context, or idle; sampled rows alternate with greedy ones. A copied slot decodes, and so does one
    to which a snapshot is restored, of a slot that went on meanwhile.

    Args:
        token_ids: how many the model takes.
        copies: the graphs that copy what slots hold.
        snapshots: places for them, where states are copied as a whole.
    """
    writer = _Writer(token_ids, graphs[0].batch_size)
    steps = [step for number, spec in enumerate(graphs) for step in writer.steps(spec, number)]
    decoding = next(spec for spec in reversed(graphs) if spec.has_decode)
    last, context = decoding.batch_size - 1, decoding.context_length
    if COPY_SLOT in copies and graphs[0].kv_block_size is not None:
        steps += writer.copied_block(decoding)
    elif COPY_SLOT in copies:
        length = max(1, context // 2)
        steps.append(_copy(0, last, length))
        # Behind the first column that is not copied, so that it stays as it is.
        steps.append(writer.step(decoding, {last: min(length + 1, context - 1)}, {}))
    if KEEP_STATE in copies:
        place, position = snapshots - 1, context // 2
        steps += [_copy(0, place, 1, KEEP_STATE), writer.step(decoding, {0: position}, {})]
        # Nothing moves by these two.
        steps += [_copy(0, place, 0, KEEP_STATE), _copy(place, 0, 0, RESTORE_STATE)]
        steps += [_copy(place, last, 1, RESTORE_STATE), writer.step(decoding, {last: position}, {})]
    return tuple(steps)


def history(specs: Sequence[TensorSpec], scales: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
    """What slots hold before the first step, state by state, exact in every type; whole numbers are -1, which stands for none.

    Args:
        scales: by state, the power of two that its largest number is about.
    """
    for number, spec in enumerate(specs):
        dtype = getattr(torch, spec.dtype)
        if not dtype.is_floating_point:
            yield spec.name, torch.full(spec.shape, -1, dtype=dtype)
            continue
        levels = np.random.default_rng([1, number]).integers(
            -_LARGEST_LEVEL, _LARGEST_LEVEL, spec.shape, dtype=np.int8, endpoint=True
        )
        step = 2.0 ** (scales[spec.name] - _LARGEST_LEVEL.bit_length())
        yield spec.name, (torch.from_numpy(levels).float() * step).to(dtype)


def digest(steps: Sequence[Step]) -> str:
    """sha256 of all that steps are given."""
    found = hashlib.sha256()
    for step in steps:
        found.update(step.graph.encode())
        for name, tensor in step.given().items():
            found.update(name.encode() + tensor.numpy().tobytes())
        if step.kept is not None:
            found.update(step.kept.numpy().tobytes())
    return found.hexdigest()


class _Writer:
    """Tells the slots' texts on from graph to graph."""

    def __init__(self, token_ids: int, slots: int) -> None:
        self._random = np.random.default_rng(0)
        self._places = np.random.default_rng(3)
        self._token_ids = token_ids
        self._slots = slots
        self._lengths = [0] * slots
        self._turn = 0

    def steps(self, spec: GraphSpec, number: int) -> Iterator[Step]:
        one, other = number % self._slots, (number + 1) % self._slots
        if not spec.has_chunk:
            for turn in range(2):
                yield self.step(spec, self._decoding(spec, turn, set()), {})
            return
        for turn, pieces in enumerate(self._pieces(spec, one, other)):
            pieces = self._fitting(spec, pieces)
            busy = {slot for slot, _, _ in pieces}
            decode = self._decoding(spec, turn, busy) if spec.has_decode else {}
            yield self.step(spec, decode, dict(enumerate(pieces)))

    def _pieces(self, spec: GraphSpec, one: int, other: int) -> list[list[tuple[int, int, int]]]:
        """Of each step: slot, first position and number of tokens by chunk row."""
        size, context, rows = spec.chunk_size, spec.context_length, spec.ctx_batch_size
        short = max(1, size * 2 // 3)
        texts = [(one, 0, size), (one, size, short)] if rows > 1 else [(one, 0, short)]
        start = texts[-1][1] + short
        texts += [(one, start, size), (other, context - size, size), (other, 0, 1)]
        kept = [piece for piece in texts if piece[1] + piece[2] <= context]
        together = rows if rows <= 2 else rows - 1  # the last of many rows idles
        return [kept[index : index + together] for index in range(0, len(kept), together)]

    def _fitting(self, spec: GraphSpec, pieces: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        if spec.kv_block_size is None:
            return pieces
        while sum(-(-end // spec.kv_block_size) for end in _ends(pieces).values()) > spec.kv_blocks:
            pieces = pieces[:-1]
        return pieces

    def _decoding(self, spec: GraphSpec, turn: int, busy: set[int]) -> dict[int, int]:
        """Slot to position of the decode rows: every third one idles."""
        # Blocks that attend in place are those of any position.
        context, positions = spec.sequence_length if spec.blocks_in_place else spec.context_length, {}
        for slot in range(self._slots):
            if slot in busy or (self._slots > 2 and (slot + turn) % 3 == 2):
                continue
            follows = self._lengths[slot] if 0 < self._lengths[slot] < context else context // 2
            # Blocks hold no text of the slot's own, and long rows have full ones to share.
            if spec.kv_block_size is not None:
                follows = context * 2 // 3
            positions[slot] = context - 1 if (slot + turn) % 2 == 0 else follows
        return positions

    def copied_block(self, spec: GraphSpec) -> list[Step]:
        """Copies part of a block, and decodes behind the first column that is not copied, so that it stays as it is."""
        assert spec.kv_block_size is not None
        length, last = spec.kv_block_size // 2, spec.kv_blocks - 1
        blocks = RandomBlocks(spec, self._places)
        row = spec.batch_size - 1
        blocks.tables[row, 0], blocks.positions[row] = last, length + 1
        return [_copy(0, last, length), self.step(spec, blocks.positions, {}, blocks)]

    def _blocks(
        self, spec: GraphSpec, decode: Mapping[int, int], chunks: Mapping[int, tuple[int, int, int]]
    ) -> RandomBlocks | None:
        if spec.kv_block_size is None:
            return None
        blocks = RandomBlocks(spec, self._places)
        blocks.give_chunks(_ends(list(chunks.values())))
        blocks.give_decodes(decode)
        return blocks

    def step(
        self,
        spec: GraphSpec,
        decode: Mapping[int, int],
        chunks: Mapping[int, tuple[int, int, int]],
        blocks: RandomBlocks | None = None,
    ) -> Step:
        """A step's inputs: `decode` is slot to position, `chunks` row to slot, first position and number of tokens.

        Args:
            blocks: those of the rows; None: any.
        """
        blocks = blocks or self._blocks(spec, decode, chunks)
        decode = decode if blocks is None else blocks.positions
        inputs = {each.name: self._input(each) for each in spec.inputs()}
        written = []
        if spec.has_decode:
            positions = inputs[f"{DECODE}.position_ids"].fill_(_IDLE)
            for slot, position in decode.items():
                positions[slot] = position
                written.append((slot, position))
                self._lengths[slot] = position + 1
        if spec.has_chunk:
            inputs[f"{CHUNK}.position_ids"].fill_(_IDLE)
            inputs[f"{CHUNK}.seq_ids"].zero_()
            for row, (slot, start, count) in chunks.items():
                columns = torch.arange(spec.chunk_size).clamp(max=count - 1)
                ids = inputs[f"{CHUNK}.input_ids"][row]
                ids.copy_(ids[columns].clone())
                inputs[f"{CHUNK}.position_ids"][row] = start + columns
                inputs[f"{CHUNK}.seq_ids"][row] = slot
                written += [(slot, position) for position in range(start, start + count)]
                self._lengths[slot] = start + count
        rows = {DECODE: tuple(decode), CHUNK: tuple(chunks), PROMPT: _tokens(spec.chunk_size, chunks)}
        kept = self._kept(inputs) if spec.on_device_sampling else None
        if blocks is None:
            return Step(spec.name, inputs, rows, tuple(written), kept)
        blocks.write(inputs, spec)
        other = gathered(spec)
        by_table = {each.name: _like(inputs, each) for each in other.inputs()}
        blocks.write(by_table, other)
        return Step(spec.name, inputs, rows, tuple(blocks.place(*place) for place in written), kept, by_table)

    def _kept(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Any tokens, which then are those of the decode rows that take them."""
        kept = torch.from_numpy(self._random.integers(0, self._token_ids, self._slots, dtype=np.int32))
        if _DECODE_IDS in inputs:
            inputs[_DECODE_IDS][_FROM_SLOTS, 0] = kept[_FROM_SLOTS]
        return kept

    def _input(self, spec: TensorSpec) -> Tensor:
        name = spec.name.split(".")[1]
        if name == "uniforms":
            return torch.from_numpy(self._random.random(spec.shape, dtype=np.float32))
        if name == "sampling_params":
            self._turn += 1
            rows = [_SAMPLED if (row + self._turn) % 2 else GREEDY for row in range(spec.shape[0])]
            return torch.tensor(rows, dtype=torch.float32)
        return torch.from_numpy(self._random.integers(0, self._token_ids, spec.shape, dtype=np.int32))


def _tokens(size: int, chunks: Mapping[int, tuple[int, int, int]]) -> tuple[int, ...]:
    return tuple(row * size + place for row, (_, _, count) in chunks.items() for place in range(count))


def _ends(pieces: Sequence[tuple[int, int, int]]) -> dict[int, int]:
    """By slot, how many tokens it has when the last of its pieces is written."""
    ends: dict[int, int] = {}
    for slot, start, count in pieces:
        ends[slot] = max(ends.get(slot, 0), start + count)
    return ends


def _like(inputs: Mapping[str, Tensor], spec: TensorSpec) -> Tensor:
    """An input of this shape, with what another of its name and shape holds."""
    found = inputs.get(spec.name)
    if found is not None and tuple(found.shape) == spec.shape:
        return found.clone()
    return torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))


def _copy(source: int, destination: int, length: int, graph: str = COPY_SLOT) -> Step:
    numbers = zip(COPY_INPUTS, (source, destination, length), strict=True)
    inputs = {each.name: torch.tensor([number], dtype=torch.int32) for each, number in numbers}
    written = range(length) if graph == COPY_SLOT else ()
    return Step(graph, inputs, {}, tuple((destination, column) for column in written))
