# SPDX-License-Identifier: Apache-2.0
"""The eager target runs the step modules themselves: the reference for all others, for tests and debugging."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ..artifacts.artifact import Artifact
from ..artifacts.skeleton import assign, check_spec, check_tensors, model_for
from ..artifacts.weights import check_memory, named_tensors, read_layout, read_weights, write_weights
from ..config import NeuronConfig
from ..graphs.kv_cache import KVCache, copy_slot
from ..graphs.ops import EAGER_OPS
from ..graphs.step import StepModule
from . import CompileJob, check_one_device
from .rank_options import IN_ENVIRONMENT, RankOptions
from .threads import fit_threads


# Where several threads share a few rows, the matrix product of float32 sums some rows in another order than others,
# unless their number is a multiple of 4: then a token's result would depend on its place in the step.
_ROW_MULTIPLE = 4
# What is left of a tensor behind its last whole pair of vectors, these compute by other code, which rounds otherwise.
_VECTORS = 64
_ELEMENTWISE = frozenset(
    {
        torch.sigmoid,
        Tensor.sigmoid,
        torch.rsqrt,
        Tensor.rsqrt,
        nn.functional.silu,
        nn.functional.gelu,
        nn.functional.softplus,
        nn.functional.elu,
        nn.functional.mish,
    }
)


class _EqualRows(TorchFunctionMode):
    """Pads what linear layers and activations get, so that every row is computed alike."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.linear and len(args) > 1:
            return _linear(*args, **kwargs)
        if func in _ELEMENTWISE and args and not kwargs.get("inplace"):
            return _elementwise(func, *args, **kwargs)
        return func(*args, **kwargs)


def _linear(x: Tensor, *parameters: Tensor | None, **kwargs: Any) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    padded = nn.functional.pad(flat, (0, 0, 0, -len(flat) % _ROW_MULTIPLE))
    output = nn.functional.linear(padded, *parameters, **kwargs)[: len(flat)]  # type: ignore[arg-type]
    return output.view(*x.shape[:-1], output.shape[-1])


def _elementwise(func: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    flat = x.reshape(-1)
    padded = nn.functional.pad(flat, (0, -len(flat) % (_VECTORS * torch.get_num_threads())))
    return func(padded, *args, **kwargs)[: len(flat)].view(x.shape)


class EagerExecutable:
    """Step modules that share one model and one cache."""

    def __init__(self, steps: dict[str, StepModule], cache: KVCache) -> None:
        self._steps = steps
        self._states = {f"kv_cache.{name}": buffer for name, buffer in cache.named_buffers()}

    @torch.no_grad()
    def run(self, graph: str, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        with _EqualRows():
            return self._steps[graph](*inputs)

    def copy_slot(self, source: int, destination: int, length: int) -> None:
        copy_slot(self._states.values(), source, destination, length)

    def read_state(self, name: str) -> Tensor:
        return self._states[name].clone()

    def write_state(self, name: str, tensor: Tensor) -> None:
        self._states[name].copy_(tensor)


class EagerTarget:
    """Compiles nothing; loads the model from config.json and the weights."""

    def check(self, config: NeuronConfig) -> None:
        check_one_device(config)

    def write_model(self, model: PreTrainedModel, config: NeuronConfig, folder: Path) -> dict[str, str]:
        return write_weights(named_tensors(model), folder)

    def compile(self, job: CompileJob) -> dict[str, Any]:
        return {}

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
        states, layout = artifact.states(), read_layout(artifact)
        check_memory(states)
        model = model_for(artifact, layout, trust_remote_code=trust_remote_code)
        check_tensors(model, layout, artifact.config.dtype)
        assign(model, read_weights(artifact))
        check_spec(model, artifact.model)
        cache = KVCache(states)
        steps = {spec.name: StepModule(model, cache, spec, EAGER_OPS).eval() for spec in artifact.graphs}
        return EagerExecutable(steps, cache)
