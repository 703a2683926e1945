# SPDX-License-Identifier: Apache-2.0
"""The eager target runs the step modules themselves: the reference for all others, for tests and debugging."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..artifact import Artifact
from ..checkpoint import assign, empty_model
from ..config import NeuronConfig
from ..graphs.kv_cache import KVCache
from ..graphs.step import StepModule
from ..weights import read_weights
from . import CompileJob, check_one_device


class EagerExecutable:
    """Step modules that share one model and one cache."""

    def __init__(self, steps: dict[str, StepModule], cache: KVCache) -> None:
        self._steps = steps
        self._states = {f"kv_cache.{name}": buffer for name, buffer in cache.named_buffers()}

    @torch.no_grad()
    def run(self, graph: str, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        return self._steps[graph](*inputs)

    def read_state(self, name: str) -> Tensor:
        return self._states[name].clone()

    def write_state(self, name: str, tensor: Tensor) -> None:
        self._states[name].copy_(tensor)


class EagerTarget:
    """Compiles nothing; loads the model from config.json and the weights."""

    def check(self, config: NeuronConfig) -> None:
        check_one_device(config)

    def compile(self, job: CompileJob) -> dict[str, Any]:
        return {}

    def load(self, artifact: Artifact, *, trust_native_code: bool, trust_remote_code: bool) -> EagerExecutable:
        artifact.verify()
        model = empty_model(artifact.path, artifact.config.dtype, trust_remote_code=trust_remote_code)
        assign(model, read_weights(artifact))
        cache = KVCache(artifact.states())
        steps = {spec.name: StepModule(model, cache, spec).eval() for spec in artifact.graphs}
        return EagerExecutable(steps, cache)
