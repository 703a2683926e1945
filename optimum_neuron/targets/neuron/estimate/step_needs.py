# SPDX-License-Identifier: Apache-2.0
"""What the steps of a model need on one core: bytes of memory, bytes to read, operations, and hence time.

Weights and cache are exact: they are counted on the model that its config describes. Activations are the largest set of
tensors that a step needs at once, by the formulas below. The reserve is a guess on the safe side. Times are a roofline: no
step is faster than its bytes at full bandwidth or its products at full rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ....config import NeuronConfig
from ....graphs.spec import GraphSpec, graph_specs, state_specs
from ..sdk.hardware import MIB, Chip, Efficiency


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
    live = max(live_bytes(sizes, graph) for graph in graphs)
    return Memory(
        weights=sizes.weight_bytes,
        kv_cache=cache_bytes(sizes, config),
        activations=-(-live // SCRATCH_PAGE) * SCRATCH_PAGE,
        reserve=len(graphs) * GRAPH_RESERVE + chip.physical_cores * MICROCODE,
    )


def cache_bytes(sizes: CoreSizes, config: NeuronConfig) -> int:
    """The KV cache of a core: its own heads, and one row more than slots, where padding is written."""
    return sum(math.prod(state.shape) for state in state_specs(config, sizes.spec)) * sizes.itemsize


def live_bytes(sizes: CoreSizes, graph: GraphSpec) -> int:
    """The largest set of tensors that a step needs at once beside weights and cache.

    The hidden states, their residual and a normalized copy in float32 live all the time; with them either what the widest
    block's projections read and write, or one layer's attention, or the logits.
    """
    groups = _row_groups(graph)
    tokens = sum(group.tokens for group in groups)
    hidden = tokens * sizes.hidden_size * (2 * sizes.itemsize + 4)
    block = tokens * sizes.block_width * sizes.itemsize
    return hidden + max(block, _attention_bytes(sizes, graph, groups), _logits_bytes(sizes, graph, tokens))


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
    """Queries, keys, values and results of all tokens; of one row group also scores, mask, values as selected, gathered keys."""
    tokens = sum(group.tokens for group in groups)
    most = 0
    for layer in sizes.attention:
        dims = layer.key_dim + layer.value_dim
        projected = tokens * (layer.heads + layer.kv_heads) * dims * sizes.itemsize
        for group in groups:
            read = layer.value_dim + (layer.key_dim if group.gathered else 0)
            window = group.rows * layer.kv_heads * read * sizes.itemsize
            scores = group.tokens * (layer.heads * SCORE_BYTES + 1)
            most = max(most, projected + (window + scores) * graph.context_length)
    return most


def _logits_bytes(sizes: CoreSizes, graph: GraphSpec, tokens: int) -> int:
    """The head's result, once more in float32, and once more for the whole vocabulary where graphs return that."""
    rows = sum(group.rows for group in _row_groups(graph)) if sizes.keeps_logits else tokens
    local = rows * sizes.local_vocab * (sizes.itemsize + 4)
    return local + sum(math.prod(spec.shape) * 4 for spec in graph.outputs(sizes.spec.vocab_size))


@dataclass(frozen=True)
class Speed:
    """A step of one graph: seconds at the chip's peaks, and seconds at the shares of them that published runs reached.

    Attributes:
        tokens: that the step advances, all rows in use.
        bound: what the peak time is spent on, "memory" or "compute".
    """

    tokens: int
    peak_s: float
    expected_s: float
    bound: str

    @property
    def peak_rate(self) -> float:
        """Tokens per second that nothing exceeds."""
        return self.tokens / self.peak_s

    @property
    def expected_rate(self) -> float:
        """Tokens per second at published efficiencies."""
        return self.tokens / self.expected_s


def speed(sizes: CoreSizes, graph: GraphSpec, chip: Chip, efficiency: Efficiency) -> Speed:
    """The time of one step, of decode rows or of chunk rows, when every core of the group works on its part.

    At the peaks, a token costs the experts that it is routed to. What is expected are this project's graphs, in which every
    expert computes every token.
    """
    ((rows, length, _),) = _row_groups(graph)
    tokens = rows * length
    cache = cache_bytes_read(sizes, rows, graph.context_length) / chip.core_bandwidth
    routed, whole = (weight_bytes_read(sizes, n) / chip.core_bandwidth for n in (tokens, None))
    products, all_products = (
        flops(sizes, rows, length, graph.context_length, all_experts=every) / chip.core_flops(sizes.dtype)
        for every in (False, True)
    )
    return Speed(
        tokens=tokens,
        peak_s=max(routed + cache, products),
        expected_s=max(whole / efficiency.weights + cache / efficiency.cache, all_products / efficiency.flops),
        bound="memory" if routed + cache >= products else "compute",
    )


def weight_bytes_read(sizes: CoreSizes, tokens: int | None) -> float:
    """Bytes of weights that a step reads: all but embedding tables.

    Args:
        tokens: of routed experts, those count that as many tokens are expected to use; None: all.
    """
    unused = 0.0 if tokens is None else sum(e.bytes * (1 - e.touched(tokens)) for e in sizes.experts)
    return sizes.weight_bytes - sizes.table_bytes - unused


def cache_bytes_read(sizes: CoreSizes, rows: int, context_length: int) -> int:
    """Bytes of keys and values that a step reads: the graph's context, whatever of it is in use."""
    return rows * context_length * sum(layer.token_elements for layer in sizes.attention) * sizes.itemsize


def flops(sizes: CoreSizes, rows: int, length: int, context_length: int, *, all_experts: bool) -> float:
    """Floating point operations of a step's matrix products: two per parameter and token.

    Args:
        all_experts: whether every expert computes every token, or only those that it is routed to.
    """
    routed = sum(e.params * (1 if all_experts else e.per_token / e.count) for e in sizes.experts)
    seen = sum(layer.layers * layer.heads * (layer.key_dim + layer.value_dim) for layer in sizes.attention)
    head = sizes.head_params * (rows if sizes.keeps_logits else rows * length)
    return 2 * (rows * length * (sizes.linear_params + routed + seen * context_length) + head)
