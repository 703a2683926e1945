# SPDX-License-Identifier: Apache-2.0
"""Loads plans, binds weights and state to them, and makes them again where they cannot be used."""

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
from ...kernels.build import library
from ...kernels.plan.check import check_plan
from ...kernels.plan.program import Plan
from ...kernels.plan.values import dtype_name
from ...kernels.run.memory import allocate_arena
from ...kernels.run.short_scales import short_scales
from ...step.slot_copies import empty_snapshots
from .. import CompileJob
from ..recompile import compiled_again
from .compiler import CONSTANTS_SUFFIX, PLAN_SUFFIX, compile_graphs
from .executable import BoundPlan, CpuExecutable
from .layout import use_natural_layout
from .live_tokens import LiveTokens
from .plan_file import Facts, OldPlanError, read_plan


logger = logging.getLogger(__name__)

_Find = Callable[[str], Path]
# Of AOTInductor's packages, which held the code of graphs.
_OLD_SUFFIX = ".pt2"


def load_executable(artifact: Artifact, *, trusted: bool, trust_remote_code: bool) -> CpuExecutable:
    """Loads an artifact's plans; they are made again where they are not trusted, or are of another version of this package.

    Raises:
        ArtifactError: they were made for another artifact than the manifest describes.
        RuntimeError: the kernels cannot be built here.
        ValueError: OPTIMUM_NEURON_CPU names what this machine lacks.
    """
    library.load()  # first: what the machine lacks is no fault of the artifact's files
    reason = None if trusted else "its graphs come from the Hub, and are not trusted"
    if reason is None:
        artifact.verify()
        try:
            return _bind(artifact, _own_file(artifact))
        except OldPlanError as error:
            reason = str(error)
    logger.warning("compiling the graphs of %s again: %s", artifact.path, reason)

    def compile_checked(job: CompileJob) -> dict[str, Any]:
        _check_model(artifact, trust_remote_code=trust_remote_code)
        return compile_graphs(job)

    with compiled_again(artifact, compile_checked, trust_remote_code=trust_remote_code) as (folder, _):
        return _bind(artifact, (folder / GRAPHS_FOLDER).joinpath)


def _own_file(artifact: Artifact) -> _Find:
    """Finds files of an artifact's graphs."""
    packages = [name for name in artifact.manifest["files"] if name.endswith(_OLD_SUFFIX)]

    def find(name: str) -> Path:
        if packages:  # an export of before there were plans
            raise OldPlanError(f"it has {packages[0]}, which this version does not run")
        return artifact.graph_file(name)

    return find


def _check_model(artifact: Artifact, *, trust_remote_code: bool) -> None:
    """Refuses an artifact whose model, weights and manifest contradict each other."""
    check_memory((*artifact.states(), *artifact.snapshots()))
    layout = read_layout(artifact)
    model = model_for(artifact, layout, trust_remote_code=trust_remote_code)
    use_natural_layout(model, layout)
    check_tensors(model, layout, artifact.config.dtype)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assign(model, {name: torch.empty(each.shape, dtype=each.dtype) for name, each in layout.items()})
        check_spec(model, artifact.model)


def _bind(artifact: Artifact, find: _Find) -> CpuExecutable:
    """Binds graphs to weights and state.

    Args:
        find: from the name of a graph's file to its path.
    """
    facts = Facts.of(artifact.config, artifact.model)
    states = allocate_states(artifact.states())
    shared = read_weights(artifact) | states
    plans: dict[str, Plan] = {}
    constants: dict[str, dict[str, Tensor]] = {}
    for spec in artifact.graphs:
        path = find(spec.name + PLAN_SUFFIX)
        with _naming(path):
            plan = plans[spec.name] = read_plan(path, spec, facts, shared)
        own = _constants(find(spec.name + CONSTANTS_SUFFIX), shared) if _has_constants(plan) else {}
        with _naming(path):
            check_plan(plan, {name: dtype_name(each.dtype) for name, each in (shared | own).items()})
        constants[spec.name] = own
    with _naming(artifact.path):
        arena = allocate_arena(list(plans.values()))
        short = short_scales(plans.values(), shared)
    bound = {}
    for spec in artifact.graphs:
        tensors = shared | constants[spec.name]
        with _naming(find(spec.name + PLAN_SUFFIX)):
            bound_plan = BoundPlan(plans[spec.name], spec, artifact.model.vocab_size, tensors, arena, short)
        bound[spec.name] = bound_plan, LiveTokens(spec)
    return CpuExecutable(bound, states, empty_snapshots(artifact.config, artifact.model))


def _has_constants(plan: Plan) -> bool:
    return any(buffer.kind == "constant" for buffer in plan.buffers)


def _constants(path: Path, others: Collection[str]) -> dict[str, Tensor]:
    with _naming(path):
        names = stored_tensors(path).keys() & set(others)
        if names:
            raise ValueError(f"it holds {min(names)}, which is no constant of a graph")
        tensors: dict[str, Tensor] = load_file(path)
    return tensors


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Tells of which file a graph's own checks speak."""
    try:
        yield
    except OldPlanError:
        raise
    except (ValueError, OSError) as error:
        raise ArtifactError(f"{path} cannot be used: {error}; export the model again") from error
