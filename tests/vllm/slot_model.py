# SPDX-License-Identifier: Apache-2.0
"""A model in plain Python behind the graphs' interface: its slots, or blocks, hold tokens, and all of them decide the next one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from optimum_neuron.config import NeuronConfig
from optimum_neuron.runtime.runner import GraphRunner
from optimum_neuron.step.family import GraphFamily
from optimum_neuron.step.features.convolution.state import ConvolutionState
from optimum_neuron.step.model_spec import ModelSpec
from optimum_neuron.step.ops import EAGER_OPS
from optimum_neuron.step.spec import GREEDY, PROMPT_LOGITS, GraphSpec, SamplingParams, graph_specs
from optimum_neuron.targets import Executable


VOCAB = 300
NOTHING = -1
# 30 MB of logits. A workload asks for each text twice, to serve it and to check the answer, and texts begin alike.
REMEMBERED = 20_000
SIZES = {"batch_size": 4, "sequence_length": 64, "prefill_chunk_size": 8, "output_logits": True, "target": "eager"}


class SlotModel(Executable):
    """An executable that computes logits from all tokens before and at a row's position, read from its slot or its blocks.

    Args:
        keeps_state: whether a slot keeps state of all its tokens, too: these tokens, which have to be those that its row reads.

    Attributes:
        runs: what each run of a graph did, as `mixed 0,2 | 1:8+4`: slots that decoded, then chunks as slot, start, length.
    """

    def __init__(self, config: NeuronConfig, *, keeps_state: bool = False) -> None:
        self._states: list[list[int]] | None = [[] for _ in range(config.batch_size)] if keeps_state else None
        self._snapshots: list[list[int]] = [[] for _ in range(config.state_places)]
        self._specs = {spec.name: spec for spec in graph_specs(config)}
        self._cache = np.full((config.kv_blocks + 1, config.block_length), NOTHING, np.int32)
        self._has_blocks = config.kv_block_size is not None
        self.runs: list[str] = []
        # As compiled graphs may, every run uses the memory of the one before again.
        self._memory = {
            output.name: np.zeros(output.shape, output.dtype)
            for spec in self._specs.values()
            for output in spec.outputs(VOCAB)
        }

    def run(self, graph: str, inputs: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        spec = self._specs[graph]
        arrays = {each.name: array for each, array in zip(spec.inputs(), inputs, strict=True)}
        rows: list[tuple[str, int, np.ndarray, int]] = []  # group, row, its blocks, last position
        done: dict[str, list[str]] = {"decode": [], "chunk": []}
        if spec.has_decode:
            for slot in np.flatnonzero(arrays["decode.position_ids"][:, 0] >= 0).tolist():
                blocks, _, last = self._write(arrays, "decode", slot, slot)
                rows.append(("decode", slot, blocks, last))
                done["decode"].append(str(slot))
        if spec.has_chunk:
            for row in np.flatnonzero(arrays["chunk.position_ids"][:, 0] >= 0).tolist():
                slot = int(arrays["chunk.seq_ids"][row])
                blocks, start, last = self._write(arrays, "chunk", row, slot)
                rows.append(("chunk", row, blocks, last))
                done["chunk"].append(f"{slot}:{start}+{last + 1 - start}")
        self.runs.append(" | ".join([f"{spec.kind} {','.join(done['decode'])}".strip(), *done["chunk"]]))
        return self._outputs(spec, arrays, rows)

    def _write(self, arrays: dict[str, np.ndarray], group: str, row: int, slot: int) -> tuple[np.ndarray, int, int]:
        """Before any row reads, as graphs do: blocks of the row, first and last position."""
        positions = arrays[f"{group}.position_ids"][row]
        start, last = int(positions[0]), int(positions[-1])
        count = last + 1 - start
        if self._has_blocks:
            blocks, written = arrays[f"{group}.block_table"][row].copy(), arrays[f"{group}.write_blocks"][row, :count]
        else:
            blocks, written = np.array([slot]), np.full(count, slot)
        tokens = arrays[f"{group}.input_ids"][row, :count]
        self._cache[written, positions[:count] % self._cache.shape[1]] = tokens
        if self._states is not None:
            before = self._states[slot] if start else []
            assert len(before) == start, f"slot {slot} has state of {len(before)} tokens, and goes on behind {start}"
            self._states[slot] = [*before, *tokens.tolist()]
            assert self._states[slot] == self._cache[blocks].flatten()[: last + 1].tolist()
        return blocks, start, last

    def _outputs(
        self, spec: GraphSpec, arrays: dict[str, np.ndarray], rows: list[tuple[str, int, np.ndarray, int]]
    ) -> list[np.ndarray]:
        outputs = {output.name: self._memory[output.name] for output in spec.outputs(VOCAB)}
        for memory in outputs.values():
            memory.fill(0)
        for group, row, blocks, last in rows:
            tokens = self._cache[blocks].flatten()[: last + 1]
            if f"{group}.logits" in outputs:
                outputs[f"{group}.logits"][row] = next_logits(tokens)
            if PROMPT_LOGITS in outputs:
                whole, first = self._cache[blocks].flatten(), int(arrays["chunk.position_ids"][row, 0])
                for place, position in enumerate(range(first, last + 1), row * spec.chunk_size):
                    outputs[PROMPT_LOGITS][place] = next_logits(whole[: position + 1])
            if f"{group}.tokens" in outputs:
                params, uniform = arrays[f"{group}.sampling_params"][row], arrays[f"{group}.uniforms"][row]
                sampling = SamplingParams(*params.tolist())
                outputs[f"{group}.tokens"][row] = next_token(tokens.tobytes(), sampling, float(uniform))
        return list(outputs.values())

    def copy_slot(self, source: int, destination: int, length: int) -> None:
        self._cache[destination] = NOTHING
        self._cache[destination, :length] = self._cache[source, :length]

    def keep_state(self, slot: int, snapshot: int) -> None:
        assert self._states is not None
        self._snapshots[snapshot] = list(self._states[slot])

    def restore_state(self, snapshot: int, slot: int) -> None:
        assert self._states is not None
        self._states[slot] = list(self._snapshots[snapshot])


def next_logits(tokens: np.ndarray) -> Tensor:
    """`[VOCAB]` float32 that every one of the tokens changes."""
    return _next_logits(tokens.astype(np.int32).tobytes()).clone()


@lru_cache(REMEMBERED)
def _next_logits(tokens: bytes) -> Tensor:
    ids = np.frombuffer(tokens, np.int32)
    assert (ids != NOTHING).all(), f"rows that nobody computed are attended to: {ids.tolist()}"
    return torch.from_numpy(np.random.default_rng(ids.tolist()).standard_normal(VOCAB, np.float32) * 3)


@lru_cache(REMEMBERED)
def next_token(tokens: bytes, sampling: SamplingParams = GREEDY, uniform: float = 0.0) -> int:
    """What the on-device sampler takes behind int32 tokens."""
    logits = _next_logits(tokens)[None]
    return int(EAGER_OPS.sample(logits, torch.tensor([sampling]), torch.tensor([uniform]))[0])


def answer(
    prompt: Sequence[int], count: int, sampling: SamplingParams = GREEDY, uniforms: Sequence[float] = ()
) -> list[int]:
    """The tokens that follow a prompt; `uniforms` are the random numbers of each."""
    tokens = list(prompt)
    for index in range(count):
        before = np.asarray(tokens, np.int32).tobytes()
        tokens.append(next_token(before, sampling, uniforms[index] if uniforms else 0.0))
    return tokens[len(prompt) :]


def uniforms(seed: int | None, count: int) -> list[float]:
    """What `Engine` draws for a request with a seed; nothing without one."""
    random = np.random.default_rng(np.random.SeedSequence(seed))
    return [] if seed is None else [float(random.random(dtype=np.float32)) for _ in range(count)]


def slot_runner(*, keeps_state: bool = False, **sizes: Any) -> GraphRunner:
    """A runner over a SlotModel; `sizes` change `SIZES`."""
    config = NeuronConfig(**SIZES | sizes)
    model = STATEFUL if keeps_state else None
    runner = GraphRunner(SlotModel(config, keeps_state=keeps_state), config, graph_specs(config), model)
    assert GraphFamily(graph_specs(config)).has_mixed == config.mixed_step
    return runner


MODEL = ModelSpec(VOCAB, (), num_embeddings=VOCAB)
STATEFUL = ModelSpec(VOCAB, (ConvolutionState(0, 0, 1, 1),), num_embeddings=VOCAB)
