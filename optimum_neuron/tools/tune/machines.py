# SPDX-License-Identifier: Apache-2.0
"""The machines of a search: this CPU, which measures exported graphs, and Neuron devices with predicted times."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

from ... import progress
from ...artifact.artifact import WEIGHTS_NAME, Artifact
from ...config import NeuronConfig
from ...generate.model import NeuronModelForCausalLM
from ...kernels.host.machine import available_memory
from ...runtime.timing import measure_seconds
from ...step.spec import GraphSpec, graph_specs
from ...step.state_specs import byte_count
from ...targets.neuron.sdk.hardware import chip_of
from ...targets.neuron.sdk.step_times import DECODE, PREFILL
from ..estimate.core_sizes import CoreSizes
from ..estimate.step_needs import core_memory
from ..estimate.step_speed import graph_work
from .candidates import Candidate
from .measure import STAGES, MeasuredSteps, measure_steps
from .search import Machine
from .simulate import StepClock


# The one published pair of compile times: vllm-neuron's README of Qwen3.5 has 37 minutes with a bucket of 1,024 tokens, and 84
# with one of 2,048. No times of decode graphs are known: a graph is not taken to need less than so many minutes.
PUBLISHED_MINUTES = {1024: 37.0, 2048: 84.0}
LEAST_MINUTES = 2.0


class CpuMachine(Machine):
    """This CPU. One measured export serves all candidates that can have its graphs."""

    is_measured = True

    def __init__(self, exports: Iterable[MeasuredSteps]) -> None:
        found = list(exports)
        self._found = {_export_key(each.artifact.config): each for each in found}
        self.reuses_prefixes = all(each.artifact.model.reuses_prefixes for each in found)
        spread = sum(each.spread for each in found) / len(found)
        graphs = sum(len(each.artifact.graphs) for each in found)
        unsteady = f"Runs of one step differed by {spread:.0%}: something else used the cores; measure again when it is quiet."
        self.about = (
            f"Step times are measured on this CPU: {sum(each.runs for each in found)} runs of {graphs} graphs, "
            f"with few and with all of their tokens in use, straight lines in between, and as unlike one another as runs of one step were.",
            "Export times are measured too, with what the compile cache had.",
            *([unsteady] if spread > 0.1 else []),
        )

    @classmethod
    def from_candidates(
        cls, export: Callable[[Path, NeuronConfig], Any], candidates: Iterable[Candidate]
    ) -> CpuMachine:
        """Export and measure what candidates need; `export` makes an artifact of a config in a folder."""
        groups: dict[tuple[int, ...], list[NeuronConfig]] = {}
        for candidate in candidates:
            groups.setdefault(_export_key(candidate.config), []).append(candidate.config)
        return cls(_measure_export(export, configs) for configs in groups.values())

    def memory(self, config: NeuronConfig) -> tuple[int, int]:
        artifact, room = self._found[_export_key(config)].artifact, available_memory()
        needed = artifact.manifest["files"][WEIGHTS_NAME]["size"] + byte_count(artifact.states())
        return needed, needed if room is None else room

    def compile_minutes(self, config: NeuronConfig) -> float:
        return self._found[_export_key(config)].seconds_per_graph * len(graph_specs(config)) / 60

    def step_clock(self, config: NeuronConfig) -> StepClock:
        return self._found[_export_key(config)].clock


def _measure_export(export: Callable[[Path, NeuronConfig], Any], configs: Sequence[NeuronConfig]) -> MeasuredSteps:
    """Export all graphs as one: on a CPU those of shorter contexts compute the same as those of the longest."""
    sizes = sorted({config.prefill_chunk_size for config in configs})
    config = replace(
        configs[0],
        prefill_chunk_size=sizes[-1],
        prefill_chunk_buckets=tuple(sizes[:-1]),
        context_buckets=(configs[0].sequence_length,),
        mixed_step=any(config.mixed_step for config in configs),
    )
    with tempfile.TemporaryDirectory(prefix="optimum-neuron-tune-") as folder:
        path = Path(folder) / "artifact"
        seconds = measure_seconds(lambda: export(path, config))
        measured = measure_artifact(Artifact.open(path))
        return measured._replace(seconds_per_graph=seconds / len(measured.artifact.graphs))


def measure_artifact(artifact: Artifact) -> MeasuredSteps:
    model = NeuronModelForCausalLM.from_pretrained(artifact.path)
    title = f"Measuring {len(artifact.graphs)} graphs of {artifact.config.batch_size} rows"
    with progress.stage(title, STAGES) as advance:
        return measure_steps(artifact, model.runner.executable, advance)


def _export_key(config: NeuronConfig) -> tuple[int, ...]:
    """Return the sizes that all graphs of one artifact share."""
    return config.batch_size, config.ctx_batch_size, config.sequence_length


def graph_minutes(graph: GraphSpec, minutes: float | None) -> float:
    """Return the minutes of a compile: as given, or by a power of the graph's tokens through the published pair."""
    if minutes is not None:
        return minutes
    (small, first), (large, second) = PUBLISHED_MINUTES.items()
    power = log(second / first) / log(large / small)
    return max(LEAST_MINUTES, first * (graph.tokens / small) ** power)


class DeviceMachine(Machine):
    """Cores of one chip that share one model, as `estimate` knows them; `minutes` compile a graph, and None predicts them."""

    is_measured = False

    def __init__(
        self, sizes: CoreSizes, target: str, cores: int, minutes: float | None = None, notes: Sequence[str] = ()
    ) -> None:
        self._sizes, self._cores, self._minutes = sizes, cores, minutes
        self._chip, self.reuses_prefixes = chip_of(target), sizes.spec.reuses_prefixes
        self.about = (
            f"Step times are predicted from published runs, not measured on a device: a decode step may take {DECODE.low:g} to "
            f"{DECODE.high:g} times as long, a chunk {PREFILL.low:g} to {PREFILL.high:g} times.",
            "Compile times are a guess through one published pair (37 minutes for 1,024 tokens, 84 for 2,048), one graph after "
            "the other: give --graph-minutes where you know better."
            if minutes is None
            else f"Compile times are {minutes:g} minutes a graph, as you say, one after the other.",
            "The host and copies of shared prefixes are not counted.",
            *notes,
        )

    def memory(self, config: NeuronConfig) -> tuple[int, int]:
        return core_memory(self._sizes, config, self._chip).total, self._chip.core_hbm

    def compile_minutes(self, config: NeuronConfig) -> float:
        return sum(graph_minutes(graph, self._minutes) for graph in graph_specs(config))

    def step_clock(self, config: NeuronConfig) -> StepClock:
        return StepClock(
            graph_specs(config), lambda graph: graph_work(self._sizes, graph, self._chip, self._cores).seconds
        )
