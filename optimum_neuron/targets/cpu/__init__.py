# SPDX-License-Identifier: Apache-2.0
"""The cpu target: step graphs as plans over own kernels, bound to one copy of weights and KV state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ...artifact.artifact import Artifact
from ...artifact.skeleton import assign
from ...artifact.weights import named_tensors, untie, write_weights
from ...config import NeuronConfig
from ...kernels.host.instruction_sets import choose_instruction_set
from ...parity.inspect import inspect_layers
from ...step.spec import graph_specs
from .. import CacheKeys, CompileJob, Executable, check_one_device
from ..cache.store import CompileCache
from ..rank_options import IN_ENVIRONMENT, RankOptions
from ..threads import fit_threads
from . import plan_keys
from .compiler import CACHE_KIND, PLAN_SUFFIX, compile_graphs
from .layout import use_natural_layout
from .loader import load_executable
from .native_library import load_kernels


class CpuTarget:
    """The cpu target. Its artifacts hold no native code: the kernels are this package's own, for the machine that loads it."""

    def check(self, config: NeuronConfig) -> None:
        check_one_device(config)
        load_kernels()
        CompileCache(CACHE_KIND)

    def rounds_activations(self) -> bool:
        return choose_instruction_set().rounded_is_faster

    def write_model(self, model: PreTrainedModel, config: NeuronConfig, folder: Path) -> dict[str, str]:
        use_natural_layout(model)
        return write_weights(named_tensors(model), folder)

    def compile(self, job: CompileJob) -> dict[str, Any]:
        return compile_graphs(job)

    def cache_keys(
        self, model: PreTrainedModel, config: NeuronConfig, folder: Path, *, trust_remote_code: bool
    ) -> CacheKeys:
        check_one_device(config)
        use_natural_layout(model)
        _take_memory(model)
        spec = inspect_layers(model)
        stored, tied = untie(
            named_tensors(model)
        )  # only now: a model's code may put buffers of another type in place of its own
        job = CompileJob(folder, config, spec, graph_specs(config), tied, trust_remote_code)
        return CacheKeys(CACHE_KIND, PLAN_SUFFIX, plan_keys.plan_keys(job, stored))

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


def _take_memory(model: nn.Module) -> None:
    """Give a model memory that is never filled, which costs nothing until it is touched; buffers hold zeros, as some are indices."""
    parameters = dict(model.named_parameters(prefix="model", remove_duplicate=False))
    unique, tied = untie(named_tensors(model))
    tensors = {
        name: (torch.empty if name in parameters else torch.zeros)(tensor.shape, dtype=tensor.dtype)
        for name, tensor in unique.items()
    }
    assign(model, tensors | {alias: tensors[stored] for alias, stored in tied.items()})
