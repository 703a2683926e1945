# SPDX-License-Identifier: Apache-2.0
"""This CPU: graphs are exported with the model's weights and measured, once for all candidates that have them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ... import progress
from ...artifact.artifact import WEIGHTS_NAME, Artifact
from ...config import NeuronConfig
from ...generate import NeuronModelForCausalLM
from ...runtime.stopwatch import seconds_of
from ...step.spec import graph_specs
from ...step.state_sizes import byte_count
from ...targets.processes import available_memory
from .candidates import Candidate
from .measure import STAGES, Measured, measure
from .step_times import LiveTimes


# Middle halves of runs that are wider than this, on average: something else took the cores.
STEADY = 0.1


@dataclass(frozen=True)
class _Export:
    """One artifact, measured and gone again."""

    artifact: Artifact
    measured: Measured
    seconds_per_graph: float | None
    weight_bytes: int


class CpuMachine:
    """Measures what candidates need when it is made; its exports are gone then.

    Args:
        export: makes an artifact of a config in a folder: `export_model` with the model's options.
        candidates: that will be asked for.
    """

    measured = True

    def __init__(self, export: Callable[[Path, NeuronConfig], Any], candidates: Iterable[Candidate]) -> None:
        self._room = available_memory()
        groups: dict[tuple[int, int, int], list[NeuronConfig]] = {}
        for candidate in candidates:
            groups.setdefault(_group(candidate.config), []).append(candidate.config)
        self._found = {key: _export_and_measure(export, _union(configs)) for key, configs in groups.items()}

    @classmethod
    def of_artifact(cls, artifact: Artifact) -> CpuMachine:
        """For one candidate, which is there already."""
        machine = cls(lambda path, config: None, ())
        machine._found[_group(artifact.config)] = _measure(artifact, None)
        return machine

    @property
    def about(self) -> Sequence[str]:
        found = [each.measured for each in self._found.values()]
        runs = sum(each.runs for each in found)
        spread = sum(each.spread for each in found) / len(found)
        told = (
            f"Step times are measured on this CPU: {runs} runs of {sum(len(each.artifact.graphs) for each in self._found.values())} graphs, "
            f"with few and with all of their tokens in use, straight lines in between, and as unlike one another as runs of one step were.",
            "Export times are measured too, with what the compile cache had.",
        )
        if spread > STEADY:
            return (
                *told,
                f"Runs of one step differed by {spread:.0%}: something else used the cores; measure again when it is quiet.",
            )
        return told

    def memory(self, config: NeuronConfig) -> tuple[int, int]:
        found = self._found[_group(config)]
        needed = found.weight_bytes + byte_count(found.artifact.states())
        return needed, needed if self._room is None else self._room

    def compile_minutes(self, config: NeuronConfig) -> float:
        seconds = self._found[_group(config)].seconds_per_graph
        return 0.0 if seconds is None else seconds * len(graph_specs(config)) / 60

    def snapshots(self, config: NeuronConfig) -> int | None:
        return None if self._found[_group(config)].artifact.model.reuses_prefixes else config.snapshot_places

    def times(self, config: NeuronConfig) -> LiveTimes:
        return self._found[_group(config)].measured.times


def _export_and_measure(export: Callable[[Path, NeuronConfig], Any], config: NeuronConfig) -> _Export:
    with tempfile.TemporaryDirectory(prefix="optimum-neuron-tune-") as folder:
        path = Path(folder) / "artifact"
        seconds = seconds_of(lambda: export(path, config))
        artifact = Artifact.open(path)
        return _measure(artifact, seconds / len(artifact.graphs))


def _measure(artifact: Artifact, seconds_per_graph: float | None) -> _Export:
    model = NeuronModelForCausalLM.from_pretrained(artifact.path)
    config = artifact.config
    title = f"Measuring {len(artifact.graphs)} graphs of {config.batch_size} rows"
    with progress.stage(title, STAGES) as advance:
        measured = measure(artifact, model.runner.executable, advance)
    weights = artifact.manifest["files"][WEIGHTS_NAME]["size"]
    return _Export(artifact, measured, seconds_per_graph, weights)


def _group(config: NeuronConfig) -> tuple[int, int, int]:
    """What graphs have in common that one artifact can have."""
    return config.batch_size, config.ctx_batch_size, config.sequence_length


def _union(configs: Sequence[NeuronConfig]) -> NeuronConfig:
    """One artifact with all graphs of several: on a CPU those of shorter contexts compute the same as those of the longest."""
    sizes = sorted({config.prefill_chunk_size for config in configs})
    return replace(
        configs[0],
        prefill_chunk_size=sizes[-1],
        prefill_chunk_buckets=tuple(sizes[:-1]),
        context_buckets=(configs[0].sequence_length,),
        mixed_step=any(config.mixed_step for config in configs),
    )
