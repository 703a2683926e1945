# SPDX-License-Identifier: Apache-2.0
"""The memory of one core that a model's steps need, in bytes: weights and cache are exact, the reserve is a guess on the safe side."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ...config import NeuronConfig
from ...step.features.recurrence.state import RecurrentState
from ...step.spec import GraphSpec, graph_specs
from ...step.state_specs import kept_states
from ...targets.neuron.operators import attention
from ...targets.neuron.operators.expert_forms import TILE_ROWS, ExpertLayer, all_experts, choose, work
from ...targets.neuron.sdk.hardware import MIB, Chip
from .core_sizes import CoreSizes


# The runtime's micro-code per physical core and the pages in which it takes scratch memory, which all graphs share: Neuron
# SDK documentation, neuron-runtime/explore/device-memory.
MICROCODE = 96 * MIB
SCRATCH_PAGE = 512 * MIB
# Instructions and DMA descriptors of a loaded graph: hundreds of MB where all layers of a large model are unrolled.
GRAPH_RESERVE = 512 * MIB
# Tried lengths above this are its multiples.
_LENGTH_STEP = 1024
# An operator reads scores in float32 and writes others.
SCORE_BYTES = 2 * 4


@dataclass(frozen=True)
class CoreMemory:
    """Bytes of device memory of one core."""

    weights: int
    kv_cache: int
    activations: int
    reserve: int

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.activations + self.reserve


def core_memory(sizes: CoreSizes, config: NeuronConfig, chip: Chip) -> CoreMemory:
    """Return the bytes that a core needs: activations in whole scratch pages, and a reserve of every graph."""
    graphs = graph_specs(config)
    live = max(live_bytes(sizes, graph, chip, config.scan_block) for graph in graphs)
    return CoreMemory(
        weights=sizes.weight_bytes,
        kv_cache=cache_bytes(sizes, config),
        activations=-(-live // SCRATCH_PAGE) * SCRATCH_PAGE,
        reserve=len(graphs) * GRAPH_RESERVE + chip.physical_cores * MICROCODE,
    )


def _fits_core(sizes: CoreSizes, options: Mapping[str, Any], chip: Chip) -> bool:
    return core_memory(sizes, NeuronConfig.from_dict(options), chip).total <= chip.core_hbm


def largest_batch(sizes: CoreSizes, config: NeuronConfig, options: Mapping[str, Any], chip: Chip) -> int:
    """Count rows at full length, of blocks too. The chunk size stays as it is, so that a larger batch never needs less."""
    asked = {**options, "prefill_chunk_size": config.prefill_chunk_size, "kv_cache_tokens": None}
    least = max(config.ctx_batch_size, 2 if options.get("mixed_step") else 1)
    batches = range(least, config.sequence_length - config.prompt_capacity + 1)
    return _last_fitting(batches, lambda batch: _fits_core(sizes, {**asked, "batch_size": batch}, chip))


def longest_sequence(
    sizes: CoreSizes, config: NeuronConfig, options: Mapping[str, Any], chip: Chip, longest: int
) -> int:
    """Search lengths below 1024, its multiples, and the config's own: among those, a longer one never has fewer graphs."""

    def fits(length: int) -> bool:
        changes: dict[str, Any] = {"sequence_length": length, "prefill_chunk_size": config.prefill_chunk_size}
        if config.kv_cache_tokens is not None:
            changes["kv_cache_tokens"] = max(length, config.kv_cache_tokens)
        if options.get("context_buckets") is not None:
            changes["context_buckets"] = (*(size for size in config.context_buckets[:-1] if size < length), length)
        return _fits_core(sizes, {**options, **changes}, chip)

    least = config.step_capacity
    if config.kv_block_size is not None:
        first, step = config.blocks_of(config.prefill_chunk_size), config.kv_block_size
        lengths = list(range(first * step, longest + 1, step))
    else:
        multiples = range(-(-least // _LENGTH_STEP) * _LENGTH_STEP, longest + 1, _LENGTH_STEP)
        lengths = [*range(least, min(_LENGTH_STEP, longest + 1)), *multiples]
    found = _last_fitting(lengths, fits)
    return max(found, config.sequence_length) if fits(config.sequence_length) else found


def _last_fitting(values: Sequence[int], fits: Callable[[int], bool]) -> int:
    """Return the last of ascending values that fits, where all before it do; 0 if none does."""
    place = bisect_right(values, False, key=lambda value: not fits(value))
    return values[place - 1] if place else 0


def cache_bytes(sizes: CoreSizes, config: NeuronConfig) -> int:
    """Return the bytes of a core's states, with one row more for padding, and of copies that slots keep."""
    total = 0
    for state in kept_states(config, sizes.spec):
        # The model's type, which a config may leave open.
        itemsize = sizes.itemsize if state.dtype == config.dtype else getattr(torch, state.dtype).itemsize
        total += math.prod(state.shape) * itemsize
    return total


def live_bytes(sizes: CoreSizes, graph: GraphSpec, chip: Chip, scan_block: int | None) -> int:
    """Return the bytes of the largest set of tensors that a step needs at once, without weights and cache.

    The hidden states, their residual and a normalized copy in float32 live all the time; with them either what the widest
    block's projections read and write, or one layer's attention, or its recurrence in blocks of `scan_block` tokens, or the logits.
    """
    groups = row_groups(graph)
    tokens = sum(group.tokens for group in groups)
    hidden = tokens * sizes.hidden_size * (2 * sizes.itemsize + 4)
    # Experts: in whole tiles of rows, and the most of all smaller steps, so that a larger step never needs less.
    tiles = (*range(1, min(tokens, TILE_ROWS) + 1), *range(2 * TILE_ROWS, tokens + TILE_ROWS, TILE_ROWS))
    routed = (_most_elements(each.layer, end, chip) for each in sizes.experts for end in tiles)
    block = max(tokens * sizes.block_width, max(routed, default=0))
    # The head's result, once more in float32, and once more for the whole vocabulary where graphs return that.
    few = sizes.keeps_logits and not graph.scores_prompts
    logits = (sum(group.rows for group in groups) if few else tokens) * sizes.local_vocab * (sizes.itemsize + 4)
    logits += sum(math.prod(spec.shape) * 4 for spec in graph.outputs(sizes.spec.vocab_size))
    return hidden + max(
        block * sizes.itemsize,
        _attention_bytes(sizes, graph, groups),
        _recurrence_bytes(sizes, groups, scan_block or 1),
        logits,
    )


@lru_cache(maxsize=1 << 16)
def _most_elements(layer: ExpertLayer, end: int, chip: Chip) -> int:
    """Return the elements of a step of `end` tokens, or of one in the tile before; the form may change within it."""
    forms = [choose(layer, end, chip)]
    if end > TILE_ROWS and choose(layer, end - TILE_ROWS + 1, chip).kind == "all":
        forms.append(all_experts(end))
    return max(work(layer, end, form, chip).live for form in forms)


class GraphRows(NamedTuple):
    """A row group of a step: decode rows read the cache in place, chunk rows gather their slots' rows of it."""

    rows: int
    length: int  # tokens of a row
    columns: float  # columns of the cache that a row reads on average; of blocks in place, its share of them
    gathered: bool

    @property
    def tokens(self) -> int:
        return self.rows * self.length


def row_groups(graph: GraphSpec) -> list[GraphRows]:
    """Return the decode rows and the chunk rows of a graph's step."""
    groups = []
    if graph.has_decode:
        columns = (graph.kv_block_size or 0) * graph.blocks_in_place or graph.batch_size * graph.context_length
        groups.append(GraphRows(graph.batch_size, 1, columns / graph.batch_size, False))
    if graph.has_chunk:
        groups.append(GraphRows(graph.ctx_batch_size, graph.chunk_size, graph.context_length, True))
    return groups


def _attention_bytes(sizes: CoreSizes, graph: GraphSpec, groups: list[GraphRows]) -> int:
    """Count queries, keys, values and results of all tokens; for one row group also a block's scores, mask and selected values,
    and the gathered cache, of which values stay while there are more blocks."""
    tokens, columns = sum(group.tokens for group in groups), graph.context_length
    most = 0
    for layer in sizes.attention:
        dims = layer.key_dim + layer.value_dim
        projected = tokens * (layer.heads + layer.kv_heads) * dims * sizes.itemsize
        for group in groups:
            length, width = attention.score_block(group.rows * layer.heads, group.length, columns)
            in_blocks = (length, width) != (group.length, columns)
            gathered = (layer.key_dim + layer.value_dim * in_blocks) * columns if group.gathered else 0
            # As many as blocks may have, not as these have, of which there is a whole number: so a larger step never needs less.
            limit = attention.SCORES_LIMIT // (4 * layer.heads)
            selected = min(group.rows * columns, max(limit // group.length, group.rows * width))
            looked_at = min(group.tokens * columns, max(limit, group.rows * length * width))
            window = layer.kv_heads * (group.rows * gathered + layer.value_dim * selected) * sizes.itemsize
            scores = looked_at * (layer.heads * SCORE_BYTES + 1)
            most = max(most, projected + window + scores)
    return most


def _recurrence_bytes(sizes: CoreSizes, groups: list[GraphRows], block: int) -> int:
    """Count inputs of the state, queries and results of all tokens, in float32; old and new states of decode rows; and for chunk
    rows all blocks of their windows at once: a selective scan has a state after each token, others have scores and decayed
    queries, keys and values."""
    most = 0
    for each in sizes.spec.states_of(RecurrentState):
        state, keys, values = each.key_dim * each.value_dim, each.heads * each.key_dim, each.heads * each.value_dim
        numbers = sum(group.tokens for group in groups) * (each.width + keys + values)
        for group in groups:
            if not group.gathered:
                numbers += group.rows * 2 * each.heads * state
                continue
            window = group.rows * -(-(group.length + block - 1) // block) * block
            of_token = 3 * each.heads * state if each.is_selective else 4 * (keys + each.heads * block) + 2 * values
            numbers += window * (each.width + of_token)
        most = max(most, 4 * numbers)
    return most
