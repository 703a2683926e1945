# SPDX-License-Identifier: Apache-2.0
"""Plans of an artifact, loaded and bound to weights and states, or made again where they cannot be used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ...artifact.artifact import GRAPHS_FOLDER, Artifact, ArtifactError
from ...artifact.tensor_file import read_tensors
from ...artifact.weights import allocate_states, read_layout, read_weights
from ...kernels.plan import OldPlanError, Plan
from ...kernels.run.memory import TensorForm, allocate_arena
from ...kernels.run.short_scales import find_short_scales
from .. import CompileJob
from ..host_states import allocate_places
from ..recompile import compiled_again
from ..threads import count_fitted
from .executable import CpuExecutable, LiveTokens
from .facts import CONSTANTS_SUFFIX, PLAN_SUFFIX, PlanFacts
from .native_library import load_kernels


logger = logging.getLogger(__name__)


def load_executable(artifact: Artifact, *, trusted: bool, trust_remote_code: bool) -> CpuExecutable:
    """Load an artifact's plans; make them again where they are not trusted, or belong to another version of this package.

    Raises:
        ArtifactError: they were made for another artifact than the manifest describes.
        RuntimeError, ValueError: as `load_kernels`.
    """
    load_kernels()  # first: what the machine lacks is no fault of the artifact's files
    reason = None if trusted else "its graphs come from the Hub, and are not trusted"
    if reason is None:
        artifact.verify()
        try:
            return _bind_plans(artifact, artifact.graph_file)
        except OldPlanError as error:
            reason = str(error)
    logger.warning("compiling the graphs of %s again: %s", artifact.path, reason)

    from .compiler import check_model, compile_graphs

    def compile_checked(job: CompileJob) -> dict[str, Any]:
        check_model(artifact, trust_remote_code=trust_remote_code)
        return compile_graphs(job)

    with compiled_again(artifact, compile_checked, trust_remote_code=trust_remote_code) as (folder, _):
        return _bind_plans(artifact, (folder / GRAPHS_FOLDER).joinpath)


def _bind_plans(artifact: Artifact, find: Callable[[str], Path]) -> CpuExecutable:
    """Bind graphs to weights and states; `find` returns the path of a graph's file by its name."""
    states = allocate_states(artifact.states())
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_weights, artifact)  # the system copies them while Python reads plans
        try:
            plans = _read_plans(artifact, find, {**read_layout(artifact), **states})
        finally:
            shared = reading.result() | states  # where weights are wrong, that is the error
    tensors: dict[str, dict[str, np.ndarray]] = {}
    for spec in artifact.graphs:
        path, plan = find(spec.name + PLAN_SUFFIX), plans[spec.name]
        tensors[spec.name] = shared
        if any(buffer.kind == "constant" for buffer in plan.buffers):
            with _name_file(file := find(spec.name + CONSTANTS_SUFFIX)):
                tensors[spec.name] = shared | (own := read_tensors(file))
                if names := own.keys() & shared.keys():
                    raise ValueError(f"it holds {min(names)}, which is no constant of a graph")
        with _name_file(path):
            plan.check(tensors[spec.name])
    with _name_file(artifact.path):
        arena = allocate_arena(list(plans.values()))
        short = find_short_scales(plans.values(), shared)
    options: Any = {"library": load_kernels(), "short_scales": short, "threads": count_fitted}
    bound = {}
    for spec in artifact.graphs:
        forms = spec.inputs(), spec.outputs(artifact.model.vocab_size)
        with _name_file(find(spec.name + PLAN_SUFFIX)):
            bound[spec.name] = plans[spec.name].bind(tensors[spec.name], *forms, arena, **options), LiveTokens(spec)
    return CpuExecutable(bound, states, allocate_places(artifact.config, artifact.model))


def _read_plans(artifact: Artifact, find: Callable[[str], Path], forms: Mapping[str, TensorForm]) -> dict[str, Plan]:
    """Return the plans of all graphs, which are still to be checked; `forms` describes weights and states."""
    plans = {}
    for spec in artifact.graphs:
        path, facts = find(spec.name + PLAN_SUFFIX), PlanFacts(spec, artifact.model, artifact.config.dtype)
        with _name_file(path):
            plans[spec.name] = Plan.load(path, forms, facts.check)
    return plans


@contextmanager
def _name_file(path: Path) -> Iterator[None]:
    """Name the file in the errors of a graph's own checks."""
    try:
        yield
    except OldPlanError:
        raise
    except (ValueError, OSError) as error:
        raise ArtifactError(f"{path} cannot be used: {error}; export the model again") from error
