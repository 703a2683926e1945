# SPDX-License-Identifier: Apache-2.0
"""The cpu target: step graphs as plans over own kernels, bound to one copy of weights and KV state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ...artifacts.artifact import Artifact
from ...artifacts.weights import named_tensors, write_weights
from ...config import NeuronConfig
from .. import CompileJob, Executable, check_one_device
from ..cache.store import CompileCache
from ..rank_options import IN_ENVIRONMENT, RankOptions
from ..threads import fit_threads
from . import library
from .compiler import CACHE_KIND, compile_graphs
from .layout import use_natural_layout
from .loader import load_executable


class CpuTarget:
    """An artifact of it holds no native code: the kernels are this package's own, for the machine that loads it."""

    def check(self, config: NeuronConfig) -> None:
        check_one_device(config)
        library.load()
        CompileCache(CACHE_KIND)

    def write_model(self, model: PreTrainedModel, config: NeuronConfig, folder: Path) -> dict[str, str]:
        use_natural_layout(model)
        return write_weights(named_tensors(model), folder)

    def compile(self, job: CompileJob) -> dict[str, Any]:
        return compile_graphs(job)

    def load(
        self,
        artifact: Artifact,
        *,
        trust_native_code: bool,
        trust_remote_code: bool,
        ranks: RankOptions = IN_ENVIRONMENT,
    ) -> Executable:
        ranks.refuse(artifact.target)
        fit_threads()
        return load_executable(artifact, trusted=trust_native_code, trust_remote_code=trust_remote_code)
