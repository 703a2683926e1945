# SPDX-License-Identifier: Apache-2.0
"""Loads compiled graphs, binds weights and state to them, and compiles them again where they cannot be used."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor
from torch._C._aoti import AOTIModelPackageLoader

from ...artifact import Artifact, ArtifactError
from ...graphs.kv_cache import copy_slot
from ...weights import allocate_states, read_weights
from ..recompile import compiled_again
from . import kernels
from .compiler import KERNEL_LIBRARY, PACKAGE_SUFFIX, compile_graphs
from .host import unmet_requirement


logger = logging.getLogger(__name__)


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

    They are compiled again, through the compile cache, where they are native code that is not trusted or do not fit
    this machine or this torch.

    Raises:
        RuntimeError: they would have to be compiled again, and there is no C++ compiler here.
    """
    data = artifact.manifest["target_data"]
    reason = unmet_requirement(data.get("requires", {})) if trust_native_code else "its native code is not trusted"
    if reason is None:
        folder = artifact.path / "graphs"
        artifact.verify()
        return _bind(artifact, folder, data["kernel_namespace"])
    logger.warning("compiling the graphs of %s again: %s", artifact.path, reason)
    if kernels.compiler() is None:
        raise RuntimeError(
            f"the compiled code of {artifact.path} cannot be used ({reason}), and compiling it again needs a C++ "
            f"compiler; install g++, or export the model on a machine like this one"
        )
    with compiled_again(artifact, compile_graphs, trust_remote_code=trust_remote_code) as (folder, data):
        return _bind(artifact, folder / "graphs", data["kernel_namespace"])


def _bind(artifact: Artifact, folder: Path, namespace: str | None) -> CpuExecutable:
    if namespace is not None:
        kernels.load(folder / KERNEL_LIBRARY, namespace)
    states = allocate_states(artifact.states())
    shared = read_weights(artifact) | states
    packages = {}
    for spec in artifact.graphs:
        package = _load_package(folder / (spec.name + PACKAGE_SUFFIX))
        own = folder / f"{spec.name}.safetensors"
        tensors = shared | (load_file(own) if own.is_file() else {})
        lacking = [name for name in package.get_constant_fqns() if name not in tensors]
        if lacking:
            raise ArtifactError(
                f"graph {spec.name} needs {lacking[0]}, which the artifact lacks; export the model again"
            )
        constants = {name: tensors[name] for name in package.get_constant_fqns()}
        package.load_constants(constants, use_inactive=False, check_full_update=True, user_managed=True)
        packages[spec.name] = package
    return CpuExecutable(packages, states)


def _load_package(path: Path) -> AOTIModelPackageLoader:
    # The loader that torch's load_package wraps: the wrapper looks for a C++ compiler, and warns where there is none.
    try:
        return AOTIModelPackageLoader(str(path), "model", False, 1, -1)
    except RuntimeError as error:
        raise ArtifactError(f"{path} cannot be loaded: {error}; export the model again") from error
