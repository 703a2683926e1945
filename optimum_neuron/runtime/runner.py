# SPDX-License-Identifier: Apache-2.0
"""GraphRunner: turns "advance these slots" into one run of the smallest step graph that fits.

It owns the length of every slot and refuses what does not fit before anything is written. It knows token ids only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..config import NeuronConfig
from ..graphs.spec import CHUNK, DECODE, GraphSpec, TensorSpec
from ..targets import Executable


IDLE = -1


class SamplingParams(NamedTuple):
    """How the on-device sampler chooses; temperature 0 is greedy."""

    top_k: float = 1
    top_p: float = 1.0
    temperature: float = 0.0


GREEDY = SamplingParams()


@dataclass(frozen=True)
class Chunk:
    """The next prompt tokens of one slot: at least one, at most the largest compiled chunk."""

    slot: int
    token_ids: np.ndarray
    sampling: SamplingParams = GREEDY
    uniform: float = 0.0


class StepOutput(NamedTuple):
    """Per row: the token that the on-device sampler chose, and logits; None where the graph does not return them.

    Decode rows are slots; chunk rows are in the order of the step's chunks, and stand for the last token of each.
    """

    decode_tokens: Tensor | None = None
    decode_logits: Tensor | None = None
    chunk_tokens: Tensor | None = None
    chunk_logits: Tensor | None = None


class _GroupInputs:
    """Input tensors of one row group, kept between steps; numpy views of the same memory are cheap to fill."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self.tensors = [torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in specs]
        views = {spec.name.split(".")[1]: t.numpy() for spec, t in zip(specs, self.tensors, strict=True)}
        self.input_ids: np.ndarray = views["input_ids"]
        self.position_ids: np.ndarray = views["position_ids"]
        self.seq_ids: np.ndarray | None = views.get("seq_ids")
        self.sampling_params: np.ndarray | None = views.get("sampling_params")
        self.uniforms: np.ndarray | None = views.get("uniforms")
        self.position_ids.fill(IDLE)


class GraphRunner:
    """Runs the step graphs of one artifact over its slots.

    Attributes:
        lengths: `[batch_size]`, tokens of each slot that are in the cache. A slot of length 0 is free.
        graph_calls: how often each graph ran.
    """

    def __init__(self, executable: Executable, config: NeuronConfig, graphs: Sequence[GraphSpec]) -> None:
        self.executable = executable
        self.config = config
        self.lengths = np.zeros(config.batch_size, dtype=np.int32)
        self.graph_calls: Counter[str] = Counter()
        self._decode_graphs = sorted(
            (g for g in graphs if g.kind == "token_generation"), key=lambda g: g.context_length
        )
        self._chunk_graphs = sorted(
            (g for g in graphs if g.kind == "chunked_prefill"), key=lambda g: (g.chunk_size, g.context_length)
        )
        self._decode = _GroupInputs(self._decode_graphs[0].inputs())
        self._chunks = {g.chunk_size: _GroupInputs(g.inputs()) for g in self._chunk_graphs}

    def reset(self, slot: int) -> None:
        """Frees a slot. Its cache rows stay as they are: no mask ever shows them to the next request."""
        self.lengths[slot] = 0

    def reset_all(self) -> None:
        """Frees all slots."""
        self.lengths.fill(0)

    def prefill(self, chunks: Sequence[Chunk]) -> StepOutput:
        """Advances up to `ctx_batch_size` prompts by one chunk each, all in one run.

        Raises:
            ValueError: too many chunks, a slot twice, or a chunk that fits no graph or no slot. No slot is changed.
        """
        graph = self._chunk_graph(chunks)
        group = self._chunks[graph.chunk_size]
        assert group.seq_ids is not None
        group.position_ids.fill(IDLE)
        for row, chunk in enumerate(chunks):
            count, start = len(chunk.token_ids), self.lengths[chunk.slot]
            group.input_ids[row, :count] = chunk.token_ids
            group.input_ids[row, count:] = chunk.token_ids[-1]
            group.position_ids[row, :count] = np.arange(start, start + count)
            group.position_ids[row, count:] = start + count - 1
            group.seq_ids[row] = chunk.slot
            if group.sampling_params is not None and group.uniforms is not None:
                group.sampling_params[row] = chunk.sampling
                group.uniforms[row] = chunk.uniform
        outputs = self._run(graph, group)
        for chunk in chunks:
            self.lengths[chunk.slot] += len(chunk.token_ids)
        return self._collect(graph, CHUNK, outputs)

    def decode(
        self, token_ids: np.ndarray, active: np.ndarray, sampling_params: np.ndarray, uniforms: np.ndarray
    ) -> StepOutput:
        """Advances the active slots by one token each.

        Args:
            token_ids: `[batch_size]`, the token to process per slot.
            active: `[batch_size]` bool; the other slots are left alone.
            sampling_params: `[batch_size, 3]` float32, a `SamplingParams` per row; ignored without on-device sampling.
            uniforms: `[batch_size]` float32 in [0, 1).

        Raises:
            ValueError: an active slot is full. No slot is changed.
        """
        longest = int(self.lengths[active].max(initial=0)) + 1
        if longest > self.config.sequence_length:
            slot = int(np.argmax(np.where(active, self.lengths, IDLE)))
            raise ValueError(f"slot {slot} is full: it holds sequence_length={self.config.sequence_length} tokens")
        graph = next(graph for graph in self._decode_graphs if graph.context_length >= longest)
        group = self._decode
        group.input_ids[:, 0] = token_ids
        group.position_ids[:, 0] = np.where(active, self.lengths, IDLE)
        if group.sampling_params is not None and group.uniforms is not None:
            group.sampling_params[:] = sampling_params
            group.uniforms[:] = uniforms
        outputs = self._run(graph, group)
        self.lengths += active
        return self._collect(graph, DECODE, outputs)

    def _chunk_graph(self, chunks: Sequence[Chunk]) -> GraphSpec:
        slots = [chunk.slot for chunk in chunks]
        if not 1 <= len(chunks) <= self.config.ctx_batch_size or len(set(slots)) != len(slots):
            raise ValueError(
                f"a chunk step takes 1 to ctx_batch_size={self.config.ctx_batch_size} slots, each once, not {slots}"
            )
        for chunk in chunks:
            if not 0 <= chunk.slot < self.config.batch_size:
                raise ValueError(
                    f"slot {chunk.slot} does not exist: the slots of batch_size={self.config.batch_size} start at 0"
                )
            count, start = len(chunk.token_ids), int(self.lengths[chunk.slot])
            if not 1 <= count <= self.config.chunk_sizes[-1]:
                raise ValueError(
                    f"a chunk has 1 to prefill_chunk_size={self.config.chunk_sizes[-1]} tokens, not {count}"
                )
            if start + count > self.config.sequence_length:
                raise ValueError(
                    f"slot {chunk.slot} holds {start} tokens and cannot take {count} more: "
                    f"sequence_length={self.config.sequence_length}"
                )
        largest = max(len(chunk.token_ids) for chunk in chunks)
        context = max(int(self.lengths[chunk.slot]) + len(chunk.token_ids) for chunk in chunks)
        return next(g for g in self._chunk_graphs if g.chunk_size >= largest and g.context_length >= context)

    def _run(self, graph: GraphSpec, group: _GroupInputs) -> Sequence[Tensor]:
        self.graph_calls[graph.name] += 1
        return self.executable.run(graph.name, group.tensors)

    @staticmethod
    def _collect(graph: GraphSpec, group: str, outputs: Sequence[Tensor]) -> StepOutput:
        rest = iter(outputs)
        tokens = next(rest) if graph.on_device_sampling else None
        logits = next(rest) if graph.returns_logits(group) else None
        return StepOutput(**{f"{group}_tokens": tokens, f"{group}_logits": logits})
