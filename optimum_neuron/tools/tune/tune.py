# SPDX-License-Identifier: Apache-2.0
"""From a model, a trace and limits to the sizes to export. Imports torch late."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import progress
from ...artifact.artifact import Artifact
from ...config import NEURON_TARGETS, NeuronConfig
from ...targets import resolve_target
from .candidates import Candidate, SizeGrid
from .search import Machine, Search, search_sizes
from .slo import Slo
from .trace import RequestTrace


@dataclass(frozen=True)
class TuneReport:
    """The result of a search: the model with further words of its export's command, and the grid, if any."""

    model: str
    model_words: tuple[str, ...]
    trace: RequestTrace
    slo: Slo
    grid: SizeGrid | None
    machine: Machine
    search: Search
    refused: tuple[str, ...] = ()
    compile_budget: float | None = None


def tune_model(
    model: str,
    trace: RequestTrace,
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
) -> TuneReport:
    """Search the sizes to export a model with.

    Args:
        target: "cpu", a Neuron target, or "auto", which is this machine's.
        axes: axes as `batch=4,8`, in place of those of `SizeGrid.for_target`.
        options: options of a NeuronConfig that all candidates have; without a sequence_length, the least that holds the trace.
        compile_budget: minutes of compiling, at most.
        graph_minutes: minutes of one graph, on a device; None: predicted.

    Raises:
        ValueError: a value is out of range, a request fits no sequence length, or nothing can be exported.
        FileNotFoundError: there is no such model.
    """
    target = resolve_target(target)
    if target == "cpu" and graph_minutes is not None:
        raise ValueError(
            f"--graph-minutes {graph_minutes:g} is for a device's compiler, and exports for this CPU are measured; leave it out"
        )
    fixed = {"sequence_length": trace.sequence_length, **(options or {}), "target": target}
    trace.check_length(fixed["sequence_length"])
    grid = SizeGrid.for_target(target).replace_axes(axes)
    # Wrong sizes are refused before torch is imported.
    candidates, refused = grid.make_candidates(fixed)
    hub: dict[str, Any] = {"revision": revision, "token": token, "trust_remote_code": trust_remote_code}
    machine: Machine
    if target == "cpu":
        from ...checkpoints.find import find_checkpoint
        from ...export.recipe import export_model
        from .machines import CpuMachine

        checkpoint = find_checkpoint(model, weights=False, **hub)
        checkpoint.check_length(checkpoint.load_config(), fixed["sequence_length"])
        machine = CpuMachine.from_candidates(
            lambda path, config: export_model(model, path, config=config, **hub), candidates
        )
    else:
        machine, dtype = _predict_device(model, candidates[0].config, graph_minutes, hub)
        candidates, refused = grid.make_candidates({**fixed, "dtype": dtype})
    with progress.stage("Simulating", len(candidates)) as advance:
        found = search_sizes(candidates, machine, trace, slo, compile_budget=compile_budget, advance=advance)
    words = (*(("--revision", revision) if revision else ()), *(("--trust-remote-code",) if trust_remote_code else ()))
    return TuneReport(model, words, trace, slo, grid, machine, found, tuple(refused), compile_budget)


def tune_artifact(path: Path, trace: RequestTrace, slo: Slo, *, trust_remote_code: bool = False) -> TuneReport:
    """Simulate an artifact that is there: one of the cpu target is measured, a device's is predicted; raise ValueError where neither can be."""
    artifact = Artifact.open(path)
    config = artifact.config
    if config.target not in ("cpu", *NEURON_TARGETS):
        raise ValueError(
            f"{path} is for target={config.target!r}, and steps of it have no times here; export it for cpu or a device"
        )
    trace.check_length(config.sequence_length)
    from .machines import CpuMachine, measure_artifact

    machine: Machine
    if config.target == "cpu":
        machine = CpuMachine([measure_artifact(artifact)])
    else:
        hub = {"revision": None, "token": None, "trust_remote_code": trust_remote_code}
        machine, _ = _predict_device(str(path), config, None, hub)
    with progress.stage("Simulating", 1) as advance:
        found = search_sizes([Candidate(config)], machine, trace, slo, advance=advance)
    return TuneReport(str(path), (), trace, slo, None, machine, found)


def _predict_device(
    model: str, config: NeuronConfig, graph_minutes: float | None, hub: Mapping[str, Any]
) -> tuple[Machine, str]:
    """Return the cores, and the type that "auto" stands for."""
    from ...checkpoints.find import find_checkpoint
    from ...targets.neuron.sdk.hardware import check_parallel_size
    from ..estimate.core_sizes import core_sizes
    from ..estimate.estimate import measure_checkpoint
    from .machines import DeviceMachine

    cores = config.tensor_parallel_size
    check_parallel_size(config.target, cores)
    sizes, assumed = measure_checkpoint(find_checkpoint(model, weights=False, **hub), config)
    return DeviceMachine(core_sizes(sizes, cores), config.target, cores, graph_minutes, assumed), sizes.dtype
