# SPDX-License-Identifier: Apache-2.0
"""Neuron devices as `estimate` knows them: memory of a core, and expected times of graphs. Nothing is measured on one."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import TYPE_CHECKING

from ...config import NeuronConfig
from ...step.spec import GraphSpec, graph_specs
from ...targets.neuron.sdk.hardware import CHIPS
from ...targets.neuron.sdk.step_times import DECODE, PREFILL
from ..estimate.step_needs import memory
from ..estimate.step_speed import graph_work
from .step_times import GraphTimes


if TYPE_CHECKING:
    from ..estimate.core_sizes import CoreSizes

# The one published pair of compile times: vllm-neuron's README of Qwen3.5 has 37 minutes with a bucket of 1,024 tokens, and 84
# with one of 2,048. No times of decode graphs are known: a graph is not taken to need less than so many minutes.
PUBLISHED_MINUTES = {1024: 37.0, 2048: 84.0}
LEAST_MINUTES = 2.0


def graph_minutes(graph: GraphSpec, minutes: float | None) -> float:
    """Return the minutes of a compile: as given, or by a power of the graph's tokens through the published pair."""
    if minutes is not None:
        return minutes
    (small, first), (large, second) = PUBLISHED_MINUTES.items()
    power = log(second / first) / log(large / small)
    return max(LEAST_MINUTES, first * (graph.tokens / small) ** power)


class DeviceMachine:
    """Cores of one chip, that share one model.

    Args:
        sizes: what each core has of it.
        minutes: to compile a graph; None: as `graph_minutes` predicts it.
        notes: further sentences of `about`.
    """

    measured = False

    def __init__(
        self, sizes: CoreSizes, target: str, cores: int, minutes: float | None = None, notes: Sequence[str] = ()
    ) -> None:
        self._sizes, self._cores, self._minutes = sizes, cores, minutes
        self._chip = CHIPS[target]
        compile_time = (
            f"Compile times are {minutes:g} minutes a graph, as you say, one after the other."
            if minutes is not None
            else "Compile times are a guess through one published pair (37 minutes for 1,024 tokens, 84 for 2,048), one graph after "
            "the other: give --graph-minutes where you know better."
        )
        self.about: Sequence[str] = (
            f"Step times are predicted from published runs, not measured on a device: a decode step may take {DECODE.low:g} to "
            f"{DECODE.high:g} times as long, a chunk {PREFILL.low:g} to {PREFILL.high:g} times.",
            compile_time,
            "The host and copies of shared prefixes are not counted.",
            *notes,
        )

    def memory(self, config: NeuronConfig) -> tuple[int, int]:
        return memory(self._sizes, config, self._chip).total, self._chip.core_hbm

    def compile_minutes(self, config: NeuronConfig) -> float:
        return sum(graph_minutes(graph, self._minutes) for graph in graph_specs(config))

    def snapshots(self, config: NeuronConfig) -> int | None:
        return None if self._sizes.spec.reuses_prefixes else config.snapshot_places

    def times(self, config: NeuronConfig) -> GraphTimes:
        return GraphTimes(
            graph_specs(config), lambda graph: graph_work(self._sizes, graph, self._chip, self._cores).seconds
        )
