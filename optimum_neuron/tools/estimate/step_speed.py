# SPDX-License-Identifier: Apache-2.0
"""The one model of step times on Neuron: a roofline, which nothing beats, and the expected time, with the shares of bandwidth and
rate that published runs reached, and a latency per layer (sdk/step_times.py)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...step.spec import GraphSpec
from ...targets.neuron.operators.expert_forms import choose, work
from ...targets.neuron.sdk.hardware import Chip
from ...targets.neuron.sdk.step_times import DECODE, PREFILL, STEP_TIMES, Accuracy
from .core_sizes import CoreSizes
from .step_needs import SCORE_BYTES, row_groups


@dataclass(frozen=True)
class Speed:
    """A step of one graph, in seconds; rates are in tokens per second."""

    tokens: int  # that the step advances, all rows in use
    peak_s: float  # at the chip's peaks
    expected_s: float  # by published runs
    low_s: float  # to `high_s`: four in five models that no run of the fit had; never below the peak
    high_s: float
    bound: str  # "memory" or "compute", which takes the peak time

    @property
    def peak_rate(self) -> float:
        return self.tokens / self.peak_s

    @property
    def expected_rate(self) -> float:
        return self.tokens / self.expected_s

    @property
    def rates(self) -> tuple[float, float]:
        return self.tokens / self.high_s, self.tokens / self.low_s


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """The work of one core of a group in a step, each part in seconds at the chip's peak, but for the latencies."""

    weights: float  # reading them
    cache: float  # reading it, and writing the states of recurrences and convolutions
    products: float  # of weights
    scores: float  # reading and writing attention's float32 scores once
    latencies: float  # layers, each counted once and once more for every doubling of the group

    @property
    def seconds(self) -> float:
        """The expected time, by the constants that were fitted to published runs."""
        return (
            self.weights / STEP_TIMES.weights
            + self.cache / STEP_TIMES.cache
            + self.products / STEP_TIMES.flops
            + self.scores / STEP_TIMES.scores
            + self.latencies * STEP_TIMES.layer_s
        )


def step_work(sizes: CoreSizes, rows: int, length: int, context_length: float, chip: Chip, cores: int) -> StepWork:
    """Return the work of a step of `rows` rows of `length` tokens, of which each reads `context_length` columns on average."""
    scores = rows * length * context_length * sizes.heads * SCORE_BYTES
    moved, routed = expert_work(sizes, rows * length, chip)
    products = count_flops(sizes, rows, length, 0) + routed
    return StepWork(
        weights=(weight_bytes_read(sizes, 0) + moved) / chip.core_bandwidth,
        cache=cache_bytes_moved(sizes, rows, context_length) / chip.core_bandwidth,
        products=products / chip.core_flops(sizes.dtype),
        scores=scores / chip.core_bandwidth,
        latencies=sizes.spec.depth * (1 + math.log2(cores)),
    )


def graph_work(sizes: CoreSizes, graph: GraphSpec, chip: Chip, cores: int) -> StepWork:
    """Return the work of a graph's step, whatever is in use of it: weights are read once for all its rows."""
    parts = [step_work(sizes, each.rows, each.length, each.columns, chip, cores) for each in row_groups(graph)]
    return StepWork(
        weights=max(part.weights for part in parts),
        cache=sum(part.cache for part in parts),
        products=sum(part.products for part in parts),
        scores=sum(part.scores for part in parts),
        latencies=max(part.latencies for part in parts),
    )


def graph_speed(sizes: CoreSizes, graph: GraphSpec, chip: Chip, cores: int) -> Speed:
    """Return the time of one step of decode rows or of chunk rows. At the peaks, a token costs the experts that it is routed to;
    expected are this project's graphs, which serve any routing."""
    (group,) = row_groups(graph)
    rows, length, context = group.rows, group.length, group.columns
    accuracy: Accuracy = DECODE if graph.has_decode else PREFILL
    reading = weight_bytes_read(sizes, rows * length) + cache_bytes_moved(sizes, rows, context)
    products = count_flops(sizes, rows, length, context) + routed_flops(sizes, rows * length)
    peak = chip.core_seconds(reading, {sizes.dtype: products})
    expected = graph_work(sizes, graph, chip, cores).seconds
    return Speed(
        tokens=rows * length,
        peak_s=peak,
        expected_s=expected,
        low_s=max(peak, expected * accuracy.low),
        high_s=expected * accuracy.high,
        bound="memory" if peak == chip.core_seconds(reading, {}) else "compute",
    )


def weight_bytes_read(sizes: CoreSizes, tokens: int) -> float:
    """Return the bytes of weights that a step reads: no embedding tables, and experts that tokens go to, to any alike."""
    unused = sum(e.bytes * (1 - e.layer.per_token / e.layer.experts) ** tokens for e in sizes.experts)
    return sizes.weight_bytes - sizes.table_bytes - unused


def expert_work(sizes: CoreSizes, tokens: int, chip: Chip) -> tuple[int, int]:
    """Return the bytes that routed experts read and write in the form of a chip's graphs, and their operations."""
    done = [(e.layers, work(e.layer, tokens, choose(e.layer, tokens, chip), chip)) for e in sizes.experts]
    return sum(layers * each.moved for layers, each in done), sum(layers * each.flops for layers, each in done)


def cache_bytes_moved(sizes: CoreSizes, rows: int, context_length: float) -> float:
    """Return the bytes of keys and values that a step reads, whatever is in use, and of its rows' states, read and written."""
    return rows * (context_length * sizes.token_bytes + 2 * sizes.state_bytes)


def count_flops(sizes: CoreSizes, rows: int, length: int, context_length: float) -> float:
    """Count the operations of a step's matrix products without routed experts: two per parameter and token. A row of one token scores
    its own key apart from its context."""
    seen = sum(
        layer.layers
        * layer.heads
        * ((layer.key_dim + layer.value_dim) * context_length + layer.key_dim * (length == 1))
        for layer in sizes.attention
    )
    head = sizes.head_params * (rows if sizes.keeps_logits else rows * length)
    return 2 * (rows * length * (sizes.linear_params + seen) + head)


def routed_flops(sizes: CoreSizes, tokens: int) -> float:
    """Count the operations of the experts that tokens are routed to."""
    return 2 * tokens * sum(e.params * e.layer.per_token / e.layer.experts for e in sizes.experts)
