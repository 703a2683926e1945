# SPDX-License-Identifier: Apache-2.0
"""Plans of an artifact, loaded and bound to weights and states, or made again where they cannot be used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ...artifact.artifact import GRAPHS_FOLDER, Artifact, ArtifactError
from ...artifact.skeleton import assign, check_spec, check_tensors, model_for
from ...artifact.tensor_file import stored_tensors
from ...artifact.weights import allocate_states, check_memory, read_layout, read_weights
from ...kernels.plan import OldPlanError, Plan
from ...kernels.run.memory import allocate_arena
from ...kernels.run.short_scales import find_short_scales
from .. import CompileJob
from ..host_states import empty_snapshots
from ..recompile import compiled_again
from .compiler import CONSTANTS_SUFFIX, PLAN_SUFFIX, PlanFacts, compile_graphs
from .executable import CpuExecutable, LiveTokens
from .layout import use_natural_layout
from .native_library import load_kernels


logger = logging.getLogger(__name__)

_Find = Callable[[str], Path]


def load_executable(artifact: Artifact, *, trusted: bool, trust_remote_code: bool) -> CpuExecutable:
    """Load an artifact's plans; make them again where they are not trusted, or belong to another version of this package.

    Raises:
        ArtifactError: they were made for another artifact than the manifest describes.
        RuntimeError: the kernels cannot be built here.
        ValueError: OPTIMUM_NEURON_CPU names what this machine lacks.
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

    def compile_checked(job: CompileJob) -> dict[str, Any]:
        _check_model(artifact, trust_remote_code=trust_remote_code)
        return compile_graphs(job)

    with compiled_again(artifact, compile_checked, trust_remote_code=trust_remote_code) as (folder, _):
        return _bind_plans(artifact, (folder / GRAPHS_FOLDER).joinpath)


def _check_model(artifact: Artifact, *, trust_remote_code: bool) -> None:
    """Refuse an artifact where model, weights and manifest contradict each other."""
    check_memory((*artifact.states(), *artifact.snapshots()))
    layout = read_layout(artifact)
    model = model_for(artifact, layout, trust_remote_code=trust_remote_code)
    use_natural_layout(model, layout)
    check_tensors(model, layout, artifact.config.dtype)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assign(model, {name: torch.empty(each.shape, dtype=each.dtype) for name, each in layout.items()})
        check_spec(model, artifact.model)


def _bind_plans(artifact: Artifact, find: _Find) -> CpuExecutable:
    """Bind graphs to weights and states.

    Args:
        find: from the name of a graph's file to its path.
    """
    states = allocate_states(artifact.states())
    shared = read_weights(artifact) | states
    plans: dict[str, Plan] = {}
    constants: dict[str, dict[str, Tensor]] = {}
    for spec in artifact.graphs:
        path, facts = find(spec.name + PLAN_SUFFIX), PlanFacts.collect(spec, artifact.config, artifact.model)
        with _name_file(path):
            plan = plans[spec.name] = Plan.load(path, shared, facts.check)
        own = _read_constants(find(spec.name + CONSTANTS_SUFFIX), shared) if _has_constants(plan) else {}
        with _name_file(path):
            plan.check(shared | own)
        constants[spec.name] = own
    with _name_file(artifact.path):
        arena = allocate_arena(list(plans.values()))
        short = find_short_scales(plans.values(), shared)
    bound = {}
    for spec in artifact.graphs:
        tensors, outputs = shared | constants[spec.name], spec.outputs(artifact.model.vocab_size)
        with _name_file(find(spec.name + PLAN_SUFFIX)):
            own_plan = plans[spec.name].bind(
                tensors, spec.inputs(), outputs, arena, library=load_kernels(), short_scales=short
            )
        bound[spec.name] = own_plan, LiveTokens(spec)
    return CpuExecutable(bound, states, empty_snapshots(artifact.config, artifact.model))


def _has_constants(plan: Plan) -> bool:
    return any(buffer.kind == "constant" for buffer in plan.buffers)


def _read_constants(path: Path, others: Collection[str]) -> dict[str, Tensor]:
    with _name_file(path):
        names = stored_tensors(path).keys() & set(others)
        if names:
            raise ValueError(f"it holds {min(names)}, which is no constant of a graph")
        tensors: dict[str, Tensor] = load_file(path)
    return tensors


@contextmanager
def _name_file(path: Path) -> Iterator[None]:
    """Name the file in the errors of a graph's own checks."""
    try:
        yield
    except OldPlanError:
        raise
    except (ValueError, OSError) as error:
        raise ArtifactError(f"{path} cannot be used: {error}; export the model again") from error
