# SPDX-License-Identifier: Apache-2.0
"""The cpu target: step graphs as plans over own kernels, bound to one copy of weights and KV state. Loading imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...artifact.artifact import Artifact
from ...config import NeuronConfig
from ...kernels.host.instruction_sets import choose_instruction_set
from .. import IN_ENVIRONMENT, CacheKeys, CompileJob, Executable, RankOptions, Target
from ..cache.store import CompileCache
from ..threads import count_fitted
from .facts import CACHE_KIND
from .loader import load_executable
from .native_library import start_kernels


if TYPE_CHECKING:
    from transformers import PreTrainedModel


class CpuTarget(Target):
    """The cpu target. Its artifacts hold no native code: the kernels are this package's own, for the machine that loads it."""

    keeps_graphs = True

    def prepare(self) -> None:
        start_kernels()

    def check(self, config: NeuronConfig) -> None:
        super().check(config)
        self.prepare()
        CompileCache(CACHE_KIND)

    def rounds_activations(self) -> bool:
        return choose_instruction_set().rounded_is_faster

    def write_model(self, model: PreTrainedModel, config: NeuronConfig, folder: Path) -> dict[str, str]:
        from .compiler import write_model

        return write_model(model, folder)

    def compile(self, job: CompileJob) -> dict[str, Any]:
        from .compiler import compile_graphs

        return compile_graphs(job)

    def cache_keys(
        self, model: PreTrainedModel, config: NeuronConfig, folder: Path, *, trust_remote_code: bool
    ) -> CacheKeys:
        from .compiler import find_cache_keys

        super().check(config)
        return find_cache_keys(model, config, folder, trust_remote_code=trust_remote_code)

    def load(
        self,
        artifact: Artifact,
        *,
        trust_native_code: bool,
        trust_remote_code: bool,
        ranks: RankOptions = IN_ENVIRONMENT,
    ) -> Executable:
        ranks.refuse(artifact.target)
        count_fitted()  # torch's number, where torch is there already, is lowered now
        return load_executable(artifact, trusted=trust_native_code, trust_remote_code=trust_remote_code)
