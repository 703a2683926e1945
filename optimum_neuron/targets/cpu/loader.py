# SPDX-License-Identifier: Apache-2.0
"""Loads compiled graphs, binds weights and state to them, and compiles them again where they cannot be used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch._C._aoti import AOTIModelPackageLoader
from torch._subclasses.fake_tensor import FakeTensorMode

from ...artifacts.artifact import GRAPHS_FOLDER, Artifact, ArtifactError
from ...artifacts.skeleton import assign, check_spec, check_tensors, model_for
from ...artifacts.tensor_file import stored_tensors
from ...artifacts.weights import allocate_states, check_memory, read_layout, read_weights
from ...checkpoints.digest import file_sha256
from ...graphs.kv_cache import copy_slot
from .. import CompileJob
from ..cache import CompileCache
from ..recompile import compiled_again
from . import kernels
from .compiler import CACHE_KIND, CONSTANTS_SUFFIX, KERNEL_LIBRARY, PACKAGE_SUFFIX, compile_graphs
from .experts import use_natural_layout
from .host import unmet_requirement
from .package import Facts, check_constants, check_description, open_package, read_description


logger = logging.getLogger(__name__)

_Find = Callable[[str], Path]


class CpuExecutable:
    """Compiled graphs by name, all bound to the same weights and KV state."""

    def __init__(self, packages: Mapping[str, AOTIModelPackageLoader], states: dict[str, Tensor]) -> None:
        self._packages = packages
        self._states = states

    def run(self, graph: str, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        outputs: Sequence[Tensor] = self._packages[graph].run(list(inputs))
        return outputs

    def copy_slot(self, source: int, destination: int, length: int) -> None:
        copy_slot(self._states.values(), source, destination, length)

    def read_state(self, name: str) -> Tensor:
        return self._states[name].clone()

    def write_state(self, name: str, tensor: Tensor) -> None:
        self._states[name].copy_(tensor)


def load_executable(artifact: Artifact, *, trust_native_code: bool, trust_remote_code: bool) -> CpuExecutable:
    """Loads an artifact's compiled graphs.

    They are compiled again, through the compile cache, where they are native code that is not trusted, do not fit this
    machine or this torch, or do not say what they were compiled for.

    Raises:
        ArtifactError: they were compiled for another artifact than the manifest describes.
        RuntimeError: they would have to be compiled again, and there is no C++ compiler here.
    """
    data = artifact.manifest["target_data"]
    reason = unmet_requirement(data.get("requires", {})) if trust_native_code else "its native code is not trusted"
    if reason is None:
        artifact.verify()
        descriptions = _descriptions(artifact, artifact.graph_file)
        if len(descriptions) == len(artifact.graphs):
            return _bind(artifact, artifact.graph_file, data.get("kernel_namespace"), descriptions)
        reason = "its graphs do not say what they were compiled for"
    logger.warning("compiling the graphs of %s again: %s", artifact.path, reason)
    if kernels.compiler() is None:
        raise RuntimeError(
            f"the compiled code of {artifact.path} cannot be used ({reason}), and compiling it again needs a C++ "
            f"compiler; install g++, or export the model on a machine like this one"
        )

    def compile_checked(job: CompileJob) -> dict[str, Any]:
        _check_model(artifact, trust_remote_code=trust_remote_code)
        return compile_graphs(job)

    with compiled_again(artifact, compile_checked, trust_remote_code=trust_remote_code) as (folder, data):
        find = (folder / GRAPHS_FOLDER).joinpath
        return _bind(artifact, find, data["kernel_namespace"], _descriptions(artifact, find))


def _check_model(artifact: Artifact, *, trust_remote_code: bool) -> None:
    """Refuses an artifact whose model, weights and manifest contradict each other, before compilers start."""
    check_memory(artifact.states())
    layout = read_layout(artifact)
    model = model_for(artifact, layout, trust_remote_code=trust_remote_code)
    use_natural_layout(model, layout)
    check_tensors(model, layout, artifact.config.dtype)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assign(model, {name: torch.empty(each.shape, dtype=each.dtype) for name, each in layout.items()})
        check_spec(model, artifact.model)


def _bind(
    artifact: Artifact, find: _Find, namespace: str | None, descriptions: Mapping[str, dict[str, Any]]
) -> CpuExecutable:
    """Binds graphs to weights and state.

    Args:
        find: from the name of a graph's file to its path.
        descriptions: what each graph says that it was compiled for.
    """
    library = None if namespace is None else find(KERNEL_LIBRARY)
    facts = Facts.of(artifact.config, artifact.model, namespace, library)
    for spec in artifact.graphs:
        with _naming(find(spec.name + PACKAGE_SUFFIX)):
            check_description(descriptions[spec.name], spec, facts)
    states = allocate_states(artifact.states())
    shared = read_weights(artifact) | states
    _load_kernels(artifact, namespace, library)
    packages = {spec.name: _bind_graph(spec.name, find, shared, descriptions[spec.name]) for spec in artifact.graphs}
    return CpuExecutable(packages, states)


def _load_kernels(artifact: Artifact, namespace: str | None, library: Path | None) -> None:
    if namespace is not None and library is not None:
        with _naming(library):
            kernels.load(library, namespace)
    elif kernels.are_fast_here():
        logger.warning(
            "%s was compiled without the project's own kernels, which this CPU can run: export it again", artifact.path
        )
    else:
        kernels.advise(artifact.config.dtype)


def _bind_graph(
    graph: str, find: _Find, shared: Mapping[str, Tensor], description: dict[str, Any]
) -> AOTIModelPackageLoader:
    path = find(graph + PACKAGE_SUFFIX)
    package = _load_package(path)
    names = package.get_constant_fqns()
    # What torch.export lifted out of the model's code is this graph's own.
    has_own = not shared.keys() >= set(names)
    tensors = {**shared, **_own_constants(find(graph + CONSTANTS_SUFFIX))} if has_own else shared
    with _naming(path):
        check_constants(description, names, tensors)
    constants = {name: tensors[name] for name in names}
    package.load_constants(constants, use_inactive=False, check_full_update=True, user_managed=True)
    return package


def _descriptions(artifact: Artifact, find: _Find) -> dict[str, dict[str, Any]]:
    """What graphs say that they were compiled for, by name, of those that say it."""
    descriptions = {}
    for spec in artifact.graphs:
        path = find(spec.name + PACKAGE_SUFFIX)
        with _naming(path):
            description = read_description(path)
        if description is not None:
            descriptions[spec.name] = description
    return descriptions


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Tells of which file a graph's own checks speak."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise ArtifactError(f"{path} cannot be used: {error}; export the model again") from error


def _own_constants(path: Path) -> dict[str, Tensor]:
    with _naming(path):
        stored_tensors(path)
        tensors: dict[str, Tensor] = load_file(path)
    return tensors


def _load_package(path: Path) -> AOTIModelPackageLoader:
    try:
        return open_package(path)
    except RuntimeError as error:
        with suppress(OSError):  # a machine that only loads may have no cache
            CompileCache(CACHE_KIND).forget(file_sha256(path))  # where another export would find it
        raise ArtifactError(f"{path} cannot be loaded: {error}; export the model again") from error
