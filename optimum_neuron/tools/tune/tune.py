# SPDX-License-Identifier: Apache-2.0
"""From a model, a trace and limits to what should be exported. Computes nothing itself; imports torch late."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import progress
from ...artifact.artifact import Artifact
from ...config import NEURON_TARGETS, NeuronConfig
from ...targets import resolve_target
from .candidates import Candidate, Grid
from .search import Machine, Search, search
from .slo import Slo
from .trace import Trace


TARGETS = ("auto", "cpu", *NEURON_TARGETS)


@dataclass(frozen=True)
class Report:
    """What a search found.

    Attributes:
        model: as it was named, or the artifact's folder.
        export_words: of the export's command line, what names the model more closely.
        grid: what was compared; None: an artifact's own sizes.
        refused: why combinations of the grid cannot be exported.
    """

    model: str
    export_words: tuple[str, ...]
    trace: Trace
    slo: Slo
    grid: Grid | None
    measured: bool
    about: tuple[str, ...]
    search: Search
    refused: tuple[str, ...] = ()
    compile_budget: float | None = None


def tune_model(
    model: str,
    trace: Trace,
    slo: Slo,
    *,
    target: str = "auto",
    axes: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    compile_budget: float | None = None,
    graph_minutes: float | None = None,
    revision: str | None = None,
    token: str | None = None,
    trust_remote_code: bool = False,
) -> Report:
    """Searches the sizes to export a model with.

    Args:
        target: one of TARGETS; "auto" is this machine's.
        axes: as `batch=4,8`, in place of those of `Grid.of`.
        options: of a NeuronConfig, which all candidates have; without a sequence_length, the least that holds the trace.
        compile_budget: minutes of compiling, at most.
        graph_minutes: of one graph, on a device; None: predicted.

    Raises:
        ValueError: a value is out of range, a request fits no sequence length, or nothing can be exported.
        FileNotFoundError: there is no such model.
    """
    target = resolve_target(target)
    if target == "cpu" and graph_minutes is not None:
        raise ValueError(
            f"--graph-minutes {graph_minutes:g} is of a device's compiler, and exports for this CPU are measured; leave it out"
        )
    fixed = {"sequence_length": trace.sequence_length, **(options or {}), "target": target}
    trace.check_length(fixed["sequence_length"])
    grid = Grid.of(target).replaced(axes)
    # Wrong sizes are refused before torch is imported.
    candidates, refused = grid.candidates(fixed)
    hub = {"revision": revision, "token": token, "trust_remote_code": trust_remote_code}
    machine: Machine
    if target == "cpu":
        machine = _this_cpu(model, candidates, hub)
    else:
        machine, dtype = _device(model, candidates[0].config, graph_minutes, hub)
        candidates, refused = grid.candidates({**fixed, "dtype": dtype})
    with progress.stage("Simulating", len(candidates)) as advance:
        found = search(candidates, machine, trace, slo, compile_budget=compile_budget, advance=advance)
    words = (*(("--revision", revision) if revision else ()), *(("--trust-remote-code",) if trust_remote_code else ()))
    return Report(
        model, words, trace, slo, grid, machine.measured, tuple(machine.about), found, tuple(refused), compile_budget
    )


def tune_artifact(path: Path, trace: Trace, slo: Slo, *, trust_remote_code: bool = False) -> Report:
    """What users get of an artifact that is there: of the cpu target measured, of a device's predicted.

    Raises:
        ValueError: a request does not fit it, or it has a cache of blocks, or its target is neither.
        FileNotFoundError: there is none.
    """
    artifact = Artifact.open(path)
    config = artifact.config
    if config.target not in ("cpu", *NEURON_TARGETS):
        raise ValueError(
            f"{path} is for target={config.target!r}, and steps of it have no times here; export it for cpu or a device"
        )
    trace.check_length(config.sequence_length)
    candidate = Candidate(config)
    machine: Machine
    if config.target == "cpu":
        from .cpu_machine import CpuMachine

        machine = CpuMachine.of_artifact(artifact)
    else:
        hub = {"revision": None, "token": None, "trust_remote_code": trust_remote_code}
        machine, _ = _device(str(path), config, None, hub)
    with progress.stage("Simulating", 1) as advance:
        found = search([candidate], machine, trace, slo, advance=advance, prune=False)
    return Report(str(path), (), trace, slo, None, machine.measured, tuple(machine.about), found)


def _this_cpu(model: str, candidates: Sequence[Candidate], hub: Mapping[str, Any]) -> Machine:
    from ...checkpoints.find import find_config
    from ...export.recipe import export_model
    from .cpu_machine import CpuMachine

    found = find_config(model, **hub)
    found.check_length(found.load_config(), candidates[0].config.sequence_length)
    return CpuMachine(lambda path, config: export_model(model, path, config=config, **hub), candidates)


def _device(
    model: str, config: NeuronConfig, graph_minutes: float | None, hub: Mapping[str, Any]
) -> tuple[Machine, str]:
    """The cores, and the type that "auto" stands for."""
    from ...checkpoints.find import find_config
    from ...targets.neuron.sdk.hardware import check_parallel_size
    from ..estimate.core_sizes import core_sizes
    from ..estimate.estimate import measure_checkpoint
    from .device_machine import DeviceMachine

    cores = config.tensor_parallel_size
    check_parallel_size(config.target, cores)
    sizes, assumed = measure_checkpoint(find_config(model, **hub), config)
    return DeviceMachine(core_sizes(sizes, cores), config.target, cores, graph_minutes, assumed), sizes.dtype
