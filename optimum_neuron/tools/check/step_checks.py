# SPDX-License-Identifier: Apache-2.0
"""Checks of loaded graphs: each returns its measured values, or raises CheckError."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ...artifact.artifact import Artifact
from ...config import NeuronConfig
from ...core import PromptPiece
from ...runtime.golden import Golden, replay
from ...runtime.prefill import cut_prompt
from ...runtime.runner import GraphRunner
from ...runtime.step_tensors import DecodeRows
from ...runtime.timing import measure_seconds
from ...step.spec import GREEDY, GraphSpec
from ...step.state_specs import BY_TOKEN, slot_state_specs


# Largest difference of a logit to the host's, relative to the largest logit, by type: rounding of a whole model.
TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 2e-2}


class CheckError(Exception):
    """A wrong result that a check found."""


def prefill(runner: GraphRunner, slot: int, prompt: np.ndarray, pieces: int) -> np.ndarray:
    """Return logits `[vocab]` after a prompt that a slot takes from its start, `pieces` tokens at a time."""
    runner.lengths[slot] = 0
    for chunk in cut_prompt(slot, prompt, pieces):
        output = runner.run_step([chunk])
    assert output.chunk_logits is not None
    return output.chunk_logits[0].copy()


def draw_prompt(artifact: Artifact, length: int, seed: int) -> np.ndarray:
    """Return random token ids `[length]`, int32."""
    return np.random.default_rng(seed).integers(0, artifact.model.vocab_size, length).astype(np.int32)


def check_golden(golden: Golden, artifact: Artifact, runner: GraphRunner) -> dict[str, Any]:
    """Compare tokens and logits with those that the exporting host recorded, teacher-forced."""
    steps = replay(runner, np.asarray(golden.prompt, dtype=np.int32), len(golden.tokens), golden.tokens)
    tolerance, differences, wrong = TOLERANCE[artifact.config.dtype], [0.0], []
    for index, (token, logits) in enumerate(steps):
        candidates, expected = golden.candidates[index], np.asarray(golden.logits[index], np.float32)
        scale = float(np.abs(expected).max())
        if logits is not None:
            differences.append(float(np.abs(logits[candidates] - expected).max()) / scale)
        rival = candidates.index(token) if token in candidates else None
        near = rival is not None and float(expected[0] - expected[rival]) <= tolerance * scale
        if token != golden.tokens[index] and not near:
            wrong.append(index)
    worst = float(np.max(differences))  # NaN where one of them is
    if wrong or not worst <= tolerance:
        raise CheckError(
            f"tokens {wrong} differ from the recorded ones, logits by {worst:.1e} (tolerance {tolerance:.0e})"
        )
    return {"tokens": len(steps), "largest difference": f"{worst:.1e}"}


def check_chunks(artifact: Artifact, runner: GraphRunner) -> dict[str, Any]:
    """Compare a prompt's logits between chunk boundaries."""
    size = runner.config.prefill_chunk_size
    prompt = draw_prompt(artifact, min(size + size // 2 + 1, runner.config.sequence_length), seed=1)
    runner.reserve_slots([len(prompt)])
    logits = [prefill(runner, 0, prompt, pieces) for pieces in (size, max(1, size // 2), max(1, size // 3))]
    # The graph follows from a step's length; only where one chunk graph serves all is equality to the bit promised, and
    # not of kernels, which may take a chunk's own tokens apart from those before it.
    same = len(runner.family.kind("chunked_prefill")) == 1 and "attention_cte" not in artifact.config.kernels
    _require_equal(logits, artifact, exact=same)
    return {"boundaries": len(logits), "to the bit": same}


def check_neighbours(artifact: Artifact, runner: GraphRunner) -> dict[str, Any]:
    """Compare a prompt's logits between neighbours in the other slots."""
    config = runner.config
    size = config.prefill_chunk_size
    prompt = draw_prompt(artifact, min(size, config.sequence_length), seed=2)
    lengths = [len(prompt), *(min(5 + slot, config.sequence_length) for slot in range(1, config.batch_size))]
    # Blocks may be fewer than all rows take.
    lengths = lengths[: _count_fitting(lengths, config, config.kv_blocks)]
    rows = []
    for seed in (3, 4):
        runner.reserve_slots(lengths)
        for slot, length in enumerate(lengths[1:], start=1):
            prefill(runner, slot, draw_prompt(artifact, length, seed=seed), size)
        rows.append(prefill(runner, 0, prompt, size))
    _require_equal(rows, artifact, exact=True)
    return {"slots": len(lengths)}


def check_slot_copy(artifact: Artifact, runner: GraphRunner) -> dict[str, Any]:
    """Compare the first columns of a slot, or block, with those of the one that it was copied from."""
    length = min(17, runner.config.block_length)  # the first slot's first block is the cache's
    runner.reserve_slots([length])
    prefill(runner, 0, draw_prompt(artifact, length, seed=5), runner.config.prefill_chunk_size)
    runner.executable.copy_slot(0, 1, length)
    states = [each.name for each in artifact.states() if each.name.startswith(BY_TOKEN)]
    for name in states:
        bits = runner.executable.read_state(name).view(np.uint8)
        if not np.array_equal(bits[1, :, :length], bits[0, :, :length]) or not bits[0, :, :length].any():
            raise CheckError(f"{name} of slot 1 is not that of slot 0")
    return {"states": len(states)}


def check_kept_state(artifact: Artifact, runner: GraphRunner) -> dict[str, Any]:
    """Compare a slot's state before a further token with the one that its copy restores."""
    length = min(17, runner.config.sequence_length - 1)
    runner.reserve_slots([length + 1])
    prefill(runner, 0, draw_prompt(artifact, length, seed=6), runner.config.prefill_chunk_size)
    states = [each.name for each in slot_state_specs(runner.config, artifact.model)]
    expected = {name: runner.executable.read_state(name)[0] for name in states}
    place = runner.config.state_places - 1
    runner.keep_state(0, place)
    runner.run_step([PromptPiece(0, draw_prompt(artifact, 1, seed=7))])
    runner.kept.restore_copy(place, 0)
    for name, state in expected.items():
        if not np.array_equal(runner.executable.read_state(name)[0], state):
            raise CheckError(f"{name} of slot 0 is not what copy {place} was taken of")
    return {"states": len(states), "places": place + 1}


def check_token_ids(artifact: Artifact, runner: GraphRunner) -> dict[str, Any]:
    """Try ids beyond the vocabulary, which no graph may see, and its first and last ids."""
    size = artifact.model.num_embeddings
    for token in (-1, size):
        runner.reserve_slots([1])
        try:
            runner.run_step([PromptPiece(0, np.array([token], dtype=np.int32))])
        except ValueError:
            continue
        raise CheckError(f"token id {token} was given to a graph, and the model takes those from 0 to {size - 1}")
    for token in (0, size - 1):
        runner.reserve_slots([1])
        output = runner.run_step([PromptPiece(0, np.array([token], dtype=np.int32))])
        assert output.chunk_logits is not None
        if not np.isfinite(output.chunk_logits).all():
            raise CheckError(f"token id {token} makes logits that are not finite")
        chosen = -1 if output.chunk_tokens is None else int(output.chunk_tokens[0])
        if output.chunk_tokens is not None and not 0 <= chosen < artifact.model.vocab_size:
            raise CheckError(f"after token id {token} it chose {chosen}, of {artifact.model.vocab_size} tokens")
    return {"embeddings": size, "refused": 2}


def measure_latency(runner: GraphRunner, runs: int) -> dict[str, Any]:
    """Return milliseconds per step of every graph, at the end of its context, with all rows in use that the cache holds."""
    medians = {}
    for graph in runner.family:
        lengths, chunks, decode = _full_step(graph, runner.config)
        times = []
        for _ in range(runs):
            runner.reserve_slots([graph.context_length] * len(lengths))
            runner.lengths[: len(lengths)] = lengths
            times.append(1000 * measure_seconds(partial(runner.run_step, chunks, decode, graph)))
        medians[f"{graph.name} ms"] = round(statistics.median(times), 3)
    runner.reset_slots()  # nothing needs what the runs wrote
    return medians


def _require_equal(logits: list[np.ndarray], artifact: Artifact, *, exact: bool) -> None:
    worst = float(np.abs(np.stack(logits) - logits[0]).max())  # NaN where one is
    scale = float(np.abs(logits[0]).max())
    if not worst <= (0.0 if exact else TOLERANCE[artifact.config.dtype] * scale):
        raise CheckError(f"logits differ by {worst:.1e}, the largest one is {scale:.1e}")


def _count_fitting(lengths: Sequence[int], config: NeuronConfig, most: int) -> int:
    return int(np.searchsorted(np.cumsum([config.blocks_of(length) for length in lengths]), most, side="right"))


def _full_step(graph: GraphSpec, config: NeuronConfig) -> tuple[list[int], list[PromptPiece], DecodeRows | None]:
    """Return a step that ends at the graph's context, and tokens of each slot before it; chunk rows have the first slots."""
    chunk_rows = graph.ctx_batch_size if graph.has_chunk else 0
    rows = graph.batch_size if graph.has_decode else chunk_rows
    fitting = _count_fitting([graph.context_length] * rows, config, graph.blocks_in_place or config.kv_blocks)
    rows, chunk_rows = min(rows, fitting), min(chunk_rows, fitting)
    lengths = [graph.context_length - (graph.chunk_size if slot < chunk_rows else 1) for slot in range(rows)]
    chunks = [PromptPiece(slot, np.zeros(graph.chunk_size, dtype=np.int32)) for slot in range(chunk_rows)]
    if not graph.has_decode:
        return lengths, chunks, None
    slots = np.arange(graph.batch_size)
    active = (slots >= chunk_rows) & (slots < rows)
    sampling = np.tile(np.asarray(GREEDY, dtype=np.float32), (len(slots), 1))
    decode = DecodeRows(np.zeros_like(slots, dtype=np.int32), active, sampling, np.zeros(len(slots), np.float32))
    return lengths, chunks, decode
