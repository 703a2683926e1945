# SPDX-License-Identifier: Apache-2.0
"""What the steps of a model need of one core's memory, in bytes.

Weights and cache are exact: they are counted on the model that its config describes. Activations are the largest set of
tensors that a step needs at once, by the formulas below. The reserve is a guess on the safe side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from ...config import NeuronConfig
from ...step.spec import GraphSpec, TensorSpec, graph_specs
from ...step.state_specs import state_specs
from ...targets.neuron.copy_graphs import snapshot_states
from ...targets.neuron.expert_forms import TILE_ROWS, ExpertLayer, all_experts, choose, work
from ...targets.neuron.lowering import attention
from ...targets.neuron.sdk.hardware import MIB, Chip


if TYPE_CHECKING:
    from .core_sizes import CoreSizes

# The runtime's micro-code per physical core and the pages in which it takes scratch memory, which all graphs share: Neuron
# SDK documentation, neuron-runtime/explore/device-memory.
MICROCODE = 96 * MIB
SCRATCH_PAGE = 512 * MIB
# Instructions and DMA descriptors of a loaded graph: hundreds of MB where all layers of a large model are unrolled.
GRAPH_RESERVE = 512 * MIB
# An operator reads scores in float32 and writes others.
SCORE_BYTES = 2 * 4


@dataclass(frozen=True)
class Memory:
    """Bytes of device memory of one core."""

    weights: int
    kv_cache: int
    activations: int
    reserve: int

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.activations + self.reserve


def memory(sizes: CoreSizes, config: NeuronConfig, chip: Chip) -> Memory:
    """Bytes that a core needs, whatever it has.

    Activations are those of the graph that needs most, in whole scratch pages. Every graph takes a reserve of its own.
    """
    graphs = graph_specs(config)
    live = max(live_bytes(sizes, graph, chip, config.scan_block) for graph in graphs)
    return Memory(
        weights=sizes.weight_bytes,
        kv_cache=cache_bytes(sizes, config),
        activations=-(-live // SCRATCH_PAGE) * SCRATCH_PAGE,
        reserve=len(graphs) * GRAPH_RESERVE + chip.physical_cores * MICROCODE,
    )


def cache_bytes(sizes: CoreSizes, config: NeuronConfig) -> int:
    """What slots keep on a core: keys and values of its own heads, inputs and states, and one row more for padding; and snapshots."""
    states = (*state_specs(config, sizes.spec), *snapshot_states(config, sizes.spec))
    return sum(math.prod(state.shape) * _state_itemsize(state, config, sizes) for state in states)


def _state_itemsize(state: TensorSpec, config: NeuronConfig, sizes: CoreSizes) -> int:
    """Of what has the model's type, which a config may leave open; all else is codes, float32 or int32."""
    return sizes.itemsize if state.dtype == config.dtype else getattr(torch, state.dtype).itemsize


def live_bytes(sizes: CoreSizes, graph: GraphSpec, chip: Chip, scan_block: int | None) -> int:
    """The largest set of tensors that a step needs at once beside weights and cache.

    The hidden states, their residual and a normalized copy in float32 live all the time; with them either what the widest
    block's projections read and write, or one layer's attention, or its recurrence, or the logits.

    Args:
        scan_block: tokens of a block of a recurrence (NeuronConfig).
    """
    groups = _row_groups(graph)
    tokens = sum(group.tokens for group in groups)
    hidden = tokens * sizes.hidden_size * (2 * sizes.itemsize + 4)
    block = max(tokens * sizes.block_width, *(_expert_elements(each.layer, tokens, chip) for each in sizes.experts), 0)
    return hidden + max(
        block * sizes.itemsize,
        _attention_bytes(sizes, graph, groups),
        _recurrence_bytes(sizes, groups, scan_block or 1),
        _logits_bytes(sizes, graph, tokens),
    )


def _expert_elements(layer: ExpertLayer, tokens: int, chip: Chip) -> int:
    """The most that a step of up to so many tokens has, in whole tiles of rows: so a larger step never needs less."""
    few = range(1, min(tokens, TILE_ROWS) + 1)
    more = range(2 * TILE_ROWS, tokens + TILE_ROWS, TILE_ROWS)
    return max(_most_elements(layer, end, chip) for end in (*few, *more))


@lru_cache(maxsize=1 << 16)
def _most_elements(layer: ExpertLayer, end: int, chip: Chip) -> int:
    """Of a step of `end` tokens, or of one in the tile before; the form may change within it."""
    forms = [choose(layer, end, chip)]
    if end > TILE_ROWS and choose(layer, end - TILE_ROWS + 1, chip).kind == "all":
        forms.append(all_experts(end))
    return max(work(layer, end, form, chip).live for form in forms)


class _Rows(NamedTuple):
    """A row group of a step: decode rows read the cache in place, chunk rows gather their slots' rows of it."""

    rows: int
    length: int
    gathered: bool

    @property
    def tokens(self) -> int:
        return self.rows * self.length


def _row_groups(graph: GraphSpec) -> list[_Rows]:
    decode = [_Rows(graph.batch_size, 1, False)] if graph.has_decode else []
    return decode + ([_Rows(graph.ctx_batch_size, graph.chunk_size, True)] if graph.has_chunk else [])


def _attention_bytes(sizes: CoreSizes, graph: GraphSpec, groups: list[_Rows]) -> int:
    """Queries, keys, values and results of all tokens; of one row group also a block's scores, mask and values as selected, and the
    gathered cache, of which values stay while there are more blocks."""
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


def _recurrence_bytes(sizes: CoreSizes, groups: list[_Rows], block: int) -> int:
    """Of all tokens, what changes a state, queries and results, in float32. Beside them, of decode rows their states, old and new; of
    chunk rows what their windows have of all blocks at once: of a selective scan states behind each token, else scores and
    what of queries, keys and values is decayed."""
    most = 0
    for each in sizes.spec.recurrences:
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


def _logits_bytes(sizes: CoreSizes, graph: GraphSpec, tokens: int) -> int:
    """The head's result, once more in float32, and once more for the whole vocabulary where graphs return that."""
    few = sizes.keeps_logits and not graph.scores_prompts
    rows = sum(group.rows for group in _row_groups(graph)) if few else tokens
    local = rows * sizes.local_vocab * (sizes.itemsize + 4)
    return local + sum(math.prod(spec.shape) * 4 for spec in graph.outputs(sizes.spec.vocab_size))
