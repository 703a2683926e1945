# SPDX-License-Identifier: Apache-2.0
"""The eager target runs the step modules themselves: the reference for all others, for tests and debugging."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from ..graphs.kv_cache import KVCache
from ..graphs.ops import EAGER_OPS
from ..graphs.slot_copies import SlotCopies, empty_snapshots
from ..graphs.step import StepModule
from . import CompileJob, check_one_device
from .rank_options import IN_ENVIRONMENT, RankOptions
from .threads import fit_threads


# A matrix product of float32 sums the rows left over from whole tiles in another order than others, and a token's result would
# depend on its place in the step: tiles have 4 rows where several threads share a few, 6 with AVX2 on Intel's CPUs.
_ROW_MULTIPLE = 12
# Of fewer outputs, a few rows are summed in several orders with AVX512 on Intel's CPUs, and more where threads share them.
_FEWEST_OUTPUTS = 4
_PRODUCTS = frozenset({torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm})
_SUMS_OF_PRODUCTS = frozenset({torch.baddbmm, Tensor.baddbmm})
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
    """Pads what matrix products and activations get, so that every row is computed alike."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        stands_in = next((each for each in types if not issubclass(each, Tensor)), None)
        if stands_in is not None:  # what it stands for is computed by functions of torch, which are to be padded, too
            with self:
                return stands_in.__torch_function__(func, types, args, kwargs)
        if func is nn.functional.linear and len(args) > 1:
            return _linear(*args, **kwargs)
        if func in _PRODUCTS and args[0].dim() > 1:
            return _product(func, *args, **kwargs)
        if func in _SUMS_OF_PRODUCTS:
            return _sum_of_products(func, *args, **kwargs)
        if func is nn.functional.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func in _ELEMENTWISE and args and not kwargs.get("inplace"):
            return _elementwise(func, *args, **kwargs)
        return func(*args, **kwargs)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    flat, outputs = x.reshape(-1, x.shape[-1]), weight.shape[0]
    padded = nn.functional.pad(flat, (0, 0, 0, -len(flat) % _ROW_MULTIPLE))
    if outputs < _FEWEST_OUTPUTS:
        weight = nn.functional.pad(weight, (0, 0, 0, _FEWEST_OUTPUTS - outputs))
        bias = None if bias is None else nn.functional.pad(bias, (0, _FEWEST_OUTPUTS - outputs))
    output = nn.functional.linear(padded, weight, bias)[: len(flat), :outputs]
    return output.reshape(*x.shape[:-1], outputs)


def _product(func: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    missing = -x.shape[-2] % _ROW_MULTIPLE
    if not missing:
        return func(x, *args, **kwargs)
    return func(nn.functional.pad(x, (0, 0, 0, missing)), *args, **kwargs)[..., : x.shape[-2], :].contiguous()


def _sum_of_products(func: Callable[..., Tensor], added: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`added` has a row for all of `x`, or a row each."""
    missing = (0, 0, 0, -x.shape[-2] % _ROW_MULTIPLE)
    if added.shape[-2] > 1:
        added = nn.functional.pad(added, missing)
    return func(added, nn.functional.pad(x, missing), *args, **kwargs)[..., : x.shape[-2], :].contiguous()


def _attention(
    query: Tensor, keys: Tensor, values: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    """torch takes up to 191 queries 32 at a time, which leaves some over, and then 64 or more, which does not."""
    rows = query.shape[-2]
    padded = -(-rows // _ROW_MULTIPLE) * _ROW_MULTIPLE if rows <= 2 * _ROW_MULTIPLE else max(192, -(-rows // 64) * 64)
    missing = (0, 0, 0, padded - rows)
    query = nn.functional.pad(query, missing)
    if attn_mask is not None and attn_mask.shape[-2] == rows:  # else it is one for all queries
        attn_mask = nn.functional.pad(attn_mask, missing)
    output = nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask, *args, **kwargs)
    return output[..., :rows, :].contiguous()


def _elementwise(func: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    flat = x.reshape(-1)
    padded = nn.functional.pad(flat, (0, -len(flat) % (_VECTORS * torch.get_num_threads())))
    return func(padded, *args, **kwargs)[: len(flat)].view(x.shape)


class EagerExecutable:
    """Step modules that share one model and one cache.

    Args:
        snapshots: as in `SlotCopies`.
    """

    runs_ahead = False

    def __init__(
        self, steps: dict[str, StepModule], cache: KVCache, snapshots: Mapping[str, Tensor] | None = None
    ) -> None:
        self._steps = steps
        self._states = {f"kv_cache.{name}": buffer for name, buffer in cache.named_buffers()}
        self._copies = SlotCopies(self._states, snapshots or {})

    @torch.no_grad()
    def run(self, graph: str, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        with _EqualRows():
            return self._steps[graph](*inputs)

    def copy_slot(self, source: int, destination: int, length: int) -> None:
        self._copies.copy_columns(source, destination, length)

    def keep_state(self, slot: int, snapshot: int) -> None:
        self._copies.keep(slot, snapshot)

    def restore_state(self, snapshot: int, slot: int) -> None:
        self._copies.restore(snapshot, slot)

    def read_state(self, name: str) -> Tensor:
        return self._states[name].clone()

    def write_state(self, name: str, tensor: Tensor) -> None:
        self._states[name].copy_(tensor)


class EagerTarget:
    """Compiles nothing; loads the model from config.json and the weights."""

    def check(self, config: NeuronConfig) -> None:
        check_one_device(config)

    def rounds_activations(self) -> bool:
        return False

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
        check_memory((*states, *artifact.snapshots()))
        model = model_for(artifact, layout, trust_remote_code=trust_remote_code)
        check_tensors(model, layout, artifact.config.dtype)
        assign(model, read_weights(artifact))
        check_spec(model, artifact.model)
        cache = KVCache(states)
        steps = {spec.name: StepModule(model, cache, spec, EAGER_OPS).eval() for spec in artifact.graphs}
        return EagerExecutable(steps, cache, empty_snapshots(artifact.config, artifact.model))
