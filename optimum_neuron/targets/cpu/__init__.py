# SPDX-License-Identifier: Apache-2.0
"""The cpu target: step graphs compiled ahead of time by AOTInductor, bound to one copy of weights and KV state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ...artifacts.artifact import Artifact
from ...artifacts.weights import named_tensors, write_weights
from ...config import NeuronConfig
from .. import CompileJob, Executable, check_one_device
from ..cache import CompileCache
from .compiler import CACHE_KIND, check_compiler, compile_graphs
from .experts import use_natural_layout
from .kernels import advise
from .loader import load_executable


class CpuTarget:
    """Loading needs no compiler, unless the compiled code does not fit this machine or is not trusted."""

    def check(self, config: NeuronConfig) -> None:
        check_one_device(config)
        check_compiler()
        CompileCache(CACHE_KIND)

    def write_model(self, model: PreTrainedModel, config: NeuronConfig, folder: Path) -> dict[str, str]:
        use_natural_layout(model)
        return write_weights(named_tensors(model), folder)

    def compile(self, job: CompileJob) -> dict[str, Any]:
        advise(job.config.dtype)
        return compile_graphs(job)

    def load(self, artifact: Artifact, *, trust_native_code: bool, trust_remote_code: bool) -> Executable:
        return load_executable(artifact, trust_native_code=trust_native_code, trust_remote_code=trust_remote_code)
