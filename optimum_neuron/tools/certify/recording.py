# SPDX-License-Identifier: Apache-2.0
"""The steps that a certificate executes: made from sizes and a seed alone, so that every machine makes the same.

Slots begin with a history of numbers in every column. So one step near the end of its context tries all columns that it
may see and must not see; a prompt as long as the context would cost thousands of times as much.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...config import NeuronConfig
from ...step.model_spec import ModelSpec
from ...step.spec import CHUNK, DECODE, GREEDY, PROMPT, GraphSpec, SamplingParams, TensorSpec, graph_specs
from ...targets.neuron.graphs.io import COPY_SLOT, KEEP_STATE, RESTORE_STATE
from ...targets.neuron.graphs.state_graphs import COPY_INPUTS, copy_graphs
from .random_blocks import RandomBlocks, gathered_spec


_SAMPLED = SamplingParams(8, 0.9, 0.8)
_IDLE = -1
_DECODE_IDS, _FROM_SLOTS = f"{DECODE}.input_ids", slice(0, None, 2)
# Whole numbers of so many bits are exact in every type of a cache.
_LARGEST_LEVEL = 127


@dataclass(frozen=True)
class RecordedStep:
    """One run of a graph."""

    graph: str
    inputs: Mapping[str, Tensor]  # by name, in the graph's order
    rows: Mapping[str, tuple[int, ...]]  # in use, by group; as PROMPT, tokens of all chunk rows, numbered through
    written: tuple[tuple[int, int], ...]  # slot, or block, and column of each token that the step writes
    kept: Tensor | None = None  # `[slots]` int32, the tokens that slots chose; None where the host chooses tokens
    by_table: Mapping[str, Tensor] | None = None  # inputs where rows gather the blocks of their tables, if others

    def graph_inputs(self) -> dict[str, Tensor]:
        """Return the inputs as a graph gets them: every other decode row takes the token that its slot chose."""
        if self.kept is None or _DECODE_IDS not in self.inputs:
            return dict(self.inputs)
        ids = self.inputs[_DECODE_IDS].clone()
        ids[_FROM_SLOTS] = -1
        return {**self.inputs, _DECODE_IDS: ids}


class _RowPiece(NamedTuple):
    """Tokens of a prompt in one chunk row."""

    slot: int
    start: int
    tokens: int

    @property
    def end(self) -> int:
        return self.start + self.tokens


def drawn_name(tokens: str) -> str:
    """Return the name of a sampler's tokens, from that of the tokens that its step chose."""
    return tokens.replace(".tokens", ".drawn")


def chosen_tokens(step: RecordedStep) -> Tensor:
    """Return one token of each decode row, to ask for its log-probability: any will do, and each row's own one is known."""
    return step.inputs[_DECODE_IDS][:, 0].contiguous()


def record_config(config: NeuronConfig, spec: ModelSpec) -> tuple[RecordedStep, ...]:
    ids, copies = min(spec.num_embeddings, spec.vocab_size), {graph.name for graph in copy_graphs(config, spec)}
    return record_steps(graph_specs(config), ids, copies, config.state_places)


def record_steps(
    graphs: Sequence[GraphSpec], token_ids: int, copies: Collection[str], places: int
) -> tuple[RecordedStep, ...]:
    """Return the steps of all graphs, in the order in which they run.

    Chunks: a prompt that ends within a chunk, its continuation off the chunks' boundaries, with other rows of the same prompt
    where there are several, a chunk at the end of the context, and one of a single token. Decode rows follow these prompts,
    end the context, or idle; sampled rows alternate with greedy ones. Slots decode after graphs named in `copies`, which copy
    them or restore their states from `places`.
    """
    writer = _StepWriter(token_ids, graphs[0].batch_size)
    steps = [step for number, spec in enumerate(graphs) for step in writer.write_graph(spec, number)]
    decoding = next(spec for spec in reversed(graphs) if spec.has_decode)
    last, context = decoding.batch_size - 1, decoding.context_length
    if COPY_SLOT in copies and graphs[0].kv_block_size is not None:
        steps += writer.copy_block(decoding)
    elif COPY_SLOT in copies:
        length = max(1, context // 2)
        steps.append(_copy_step(0, last, length))
        # After the first column that is not copied, so that it stays as it is.
        steps.append(writer.write_step(decoding, {last: min(length + 1, context - 1)}, {}))
    if KEEP_STATE in copies:
        place, position = places - 1, context // 2
        steps += [_copy_step(0, place, 1, KEEP_STATE), writer.write_step(decoding, {0: position}, {})]
        # Nothing moves by these two.
        steps += [_copy_step(0, place, 0, KEEP_STATE), _copy_step(place, 0, 0, RESTORE_STATE)]
        steps += [_copy_step(place, last, 1, RESTORE_STATE), writer.write_step(decoding, {last: position}, {})]
    return tuple(steps)


def state_history(specs: Sequence[TensorSpec], scales: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
    """Yield what slots hold at first: -1, or numbers up to a scale's power of two that are exact in every type."""
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


class _StepWriter:
    """The texts of all slots, which continue from graph to graph."""

    def __init__(self, token_ids: int, slots: int) -> None:
        self._random, self._places = np.random.default_rng(0), np.random.default_rng(3)
        self._token_ids, self._slots = token_ids, slots
        self._lengths = [0] * slots
        self._turn = 0

    def write_graph(self, spec: GraphSpec, number: int) -> Iterator[RecordedStep]:
        one, other = number % self._slots, (number + 1) % self._slots
        if not spec.has_chunk:
            for turn in range(2):
                yield self.write_step(spec, self._decode_positions(spec, turn, set()), {})
            return
        for turn, pieces in enumerate(_cut_prompts(spec, one, other)):
            busy = {piece.slot for piece in pieces}
            decode = self._decode_positions(spec, turn, busy) if spec.has_decode else {}
            yield self.write_step(spec, decode, dict(enumerate(pieces)))

    def _decode_positions(self, spec: GraphSpec, turn: int, busy: set[int]) -> dict[int, int]:
        """Return the position of each slot that decodes: every third one idles."""
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

    def copy_block(self, spec: GraphSpec) -> list[RecordedStep]:
        """Copy part of a block, and decode after the first column that is not copied, so that it stays as it is."""
        assert spec.kv_block_size is not None
        length, last = spec.kv_block_size // 2, spec.kv_blocks - 1
        blocks = RandomBlocks(spec, self._places)
        row = spec.batch_size - 1
        blocks.tables[row, 0], blocks.positions[row] = last, length + 1
        return [_copy_step(0, last, length), self.write_step(spec, blocks.positions, {}, blocks)]

    def write_step(
        self,
        spec: GraphSpec,
        decode: Mapping[int, int],
        chunks: Mapping[int, _RowPiece],
        blocks: RandomBlocks | None = None,
    ) -> RecordedStep:
        """Return a step from the positions of slots that decode and the pieces of chunk rows; without `blocks` it takes any."""
        if blocks is None and spec.kv_block_size is not None:
            blocks = RandomBlocks(spec, self._places)
            blocks.give_chunks(_slot_ends(chunks.values()))
            blocks.give_decodes(decode)
        decode = decode if blocks is None else blocks.positions
        inputs = {each.name: self._draw_input(each) for each in spec.inputs()}
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
            for row, piece in chunks.items():
                columns = torch.arange(spec.chunk_size).clamp(max=piece.tokens - 1)
                ids = inputs[f"{CHUNK}.input_ids"][row]
                ids.copy_(ids[columns].clone())
                inputs[f"{CHUNK}.position_ids"][row] = piece.start + columns
                inputs[f"{CHUNK}.seq_ids"][row] = piece.slot
                written += [(piece.slot, position) for position in range(piece.start, piece.end)]
                self._lengths[piece.slot] = piece.end
        prompt = tuple(row * spec.chunk_size + place for row, piece in chunks.items() for place in range(piece.tokens))
        rows = {DECODE: tuple(decode), CHUNK: tuple(chunks), PROMPT: prompt}
        kept = None
        if spec.on_device_sampling:
            kept = torch.from_numpy(self._random.integers(0, self._token_ids, self._slots, dtype=np.int32))
            if _DECODE_IDS in inputs:
                inputs[_DECODE_IDS][_FROM_SLOTS, 0] = kept[_FROM_SLOTS]
        if blocks is None:
            return RecordedStep(spec.name, inputs, rows, tuple(written), kept)
        blocks.write_inputs(inputs, spec)
        other = gathered_spec(spec)
        by_table = {each.name: torch.zeros(each.shape, dtype=getattr(torch, each.dtype)) for each in other.inputs()}
        for name, each in by_table.items():
            if name in inputs and inputs[name].shape == each.shape:
                each.copy_(inputs[name])
        blocks.write_inputs(by_table, other)
        length = spec.kv_block_size or 1
        places = tuple((int(blocks.tables[slot, place // length]), place % length) for slot, place in written)
        return RecordedStep(spec.name, inputs, rows, places, kept, by_table)

    def _draw_input(self, spec: TensorSpec) -> Tensor:
        name = spec.name.split(".")[1]
        if name == "uniforms":
            return torch.from_numpy(self._random.random(spec.shape, dtype=np.float32))
        if name == "sampling_params":
            self._turn += 1
            rows = [_SAMPLED if (row + self._turn) % 2 else GREEDY for row in range(spec.shape[0])]
            return torch.tensor(rows, dtype=torch.float32)
        return torch.from_numpy(self._random.integers(0, self._token_ids, spec.shape, dtype=np.int32))


def _cut_prompts(spec: GraphSpec, one: int, other: int) -> list[list[_RowPiece]]:
    """Return the pieces of each step's chunk rows, of two slots."""
    size, context, rows = spec.chunk_size, spec.context_length, spec.ctx_batch_size
    short = max(1, size * 2 // 3)
    texts = [_RowPiece(one, 0, size), _RowPiece(one, size, short)] if rows > 1 else [_RowPiece(one, 0, short)]
    texts += [_RowPiece(one, texts[-1].end, size), _RowPiece(other, context - size, size), _RowPiece(other, 0, 1)]
    kept = [piece for piece in texts if piece.end <= context]
    together = rows if rows <= 2 else rows - 1  # the last of many rows idles
    steps = [kept[index : index + together] for index in range(0, len(kept), together)]
    length = spec.kv_block_size
    if length is not None:
        for pieces in steps:
            while sum(-(-end // length) for end in _slot_ends(pieces).values()) > spec.kv_blocks:
                pieces.pop()
    return steps


def _slot_ends(pieces: Iterable[_RowPiece]) -> dict[int, int]:
    """Return by slot its number of tokens when the last of its pieces is written."""
    ends: dict[int, int] = {}
    for piece in pieces:
        ends[piece.slot] = max(ends.get(piece.slot, 0), piece.end)
    return ends


def _copy_step(source: int, destination: int, length: int, graph: str = COPY_SLOT) -> RecordedStep:
    numbers = zip(COPY_INPUTS, (source, destination, length), strict=True)
    inputs = {each.name: torch.tensor([number], dtype=torch.int32) for each, number in numbers}
    written = range(length) if graph == COPY_SLOT else ()
    return RecordedStep(graph, inputs, {}, tuple((destination, column) for column in written))
