# SPDX-License-Identifier: Apache-2.0
"""The eager target, which runs the step modules themselves: the reference for all others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from ..arrays import to_numpy, to_torch
from ..artifact.artifact import Artifact
from ..artifact.skeleton import assign, check_spec, check_tensors, model_for
from ..artifact.weights import named_tensors, read_layout, read_weights, write_weights
from ..config import NeuronConfig
from ..step.attention.kv_cache import KVCache
from ..step.ops import EAGER_OPS
from ..step.step import StepModule
from . import IN_ENVIRONMENT, RankOptions, Target
from .equal_rows import EqualRows
from .host_states import HostStates, allocate_places, check_state_memory
from .threads import fit_threads


class EagerExecutable(HostStates):
    """Step modules that share one model and one cache; `places` as in `HostStates`."""

    def __init__(
        self, steps: dict[str, StepModule], cache: KVCache, places: Mapping[str, np.ndarray] | None = None
    ) -> None:
        states = {f"kv_cache.{name}": to_numpy(buffer) for name, buffer in cache.named_buffers()}
        super().__init__(states, places)
        self._steps = steps

    @torch.no_grad()
    def run(self, graph: str, inputs: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        with EqualRows():
            return [to_numpy(each) for each in self._steps[graph](*map(to_torch, inputs))]


class EagerTarget(Target):
    """The eager target. It compiles nothing, and loads the model from config.json and the weights."""

    def write_model(self, model: PreTrainedModel, config: NeuronConfig, folder: Path) -> dict[str, str]:
        return write_weights(named_tensors(model), folder)

    def load(
        self,
        artifact: Artifact,
        *,
        trust_native_code: bool,
        trust_remote_code: bool,
        ranks: RankOptions = IN_ENVIRONMENT,
    ) -> EagerExecutable:
        ranks.refuse(artifact.target)
        fit_threads()
        artifact.verify()
        layout = read_layout(artifact)
        check_state_memory(artifact)
        model = model_for(artifact, layout, trust_remote_code=trust_remote_code)
        check_tensors(model, layout, artifact.config.dtype)
        weights = read_weights(artifact)
        shared = {id(each): to_torch(each) for each in weights.values()}  # tied names stay one tensor
        assign(model, {name: shared[id(each)] for name, each in weights.items()})
        check_spec(model, artifact.model)
        cache = KVCache(artifact.states())
        steps = {spec.name: StepModule(model, cache, spec, EAGER_OPS).eval() for spec in artifact.graphs}
        return EagerExecutable(steps, cache, allocate_places(artifact.config, artifact.model))
