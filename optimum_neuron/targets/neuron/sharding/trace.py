# SPDX-License-Identifier: Apache-2.0
"""A record of one forward pass, on a copy without data, so no weight is read or computed with."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from ....step.attention.rows import AttentionCall
from ....step.cache_needs import CacheNeeds
from ....step.features.selected_keys.index_keys import KeySource, ScoresOf
from ....step.features.selected_keys.indexers import IndexCache


_TOKENS = 2
# Names of aten operators, and of the argument that names their dimensions. Products of matrices are none of them: in a
# model they belong to linear layers, experts and attention, which have rules.
_REDUCTIONS = dict.fromkeys((
    "sum", "mean", "prod", "amax", "amin", "max", "min", "argmax", "argmin", "var", "std", "norm",
    "linalg_vector_norm", "logsumexp", "_softmax", "_log_softmax", "cumsum", "topk", "sort",
), "dim") | dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), "normalized_shape")  # fmt: skip


@dataclass(frozen=True)
class HeadSizes:
    """One attention layer as the attention interface sees it."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class View:
    """The source of a tensor."""

    shape: tuple[int, ...]
    source: str  # the module that gave it, or a view of it; empty where other code made it
    offset: int  # the begin of its last dimension in that output
    step: int  # the distance of its values there


@dataclass(frozen=True)
class Reduction:
    """One operator's run in a module, with the sizes of the dimensions that it reduces."""

    module: str
    name: str
    sizes: tuple[int, ...]


@dataclass
class ModelTrace:
    # Every module's runs, in the order in which they began, with the first input; None where that is no tensor.
    calls: list[tuple[str, View | None]] = field(default_factory=list)
    # Arguments and keywords of each module's last run.
    inputs: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    # Heads by the name of the module that called the attention interface.
    attention: dict[str, HeadSizes] = field(default_factory=dict)
    values: dict[str, View] = field(default_factory=dict)  # its values, likewise
    reductions: list[Reduction] = field(default_factory=list)  # sums, norms and the like over a dimension
    logits_size: int = 0  # logits per token
    # Heads of a layer that select keys, each by itself; 1 where all heads attend to the same, or to all.
    selecting_heads: int = 1

    @property
    def called(self) -> list[str]:
        return [name for name, _ in self.calls]


@dataclass(frozen=True)
class _TracedKeys(KeySource):
    """Keys that count the heads that select."""

    trace: ModelTrace

    def select_top(self, scores: Tensor, of: ScoresOf, count: int) -> Any:
        self.trace.selecting_heads = max(self.trace.selecting_heads, scores.shape[1])
        return super().select_top(scores, of, count)


class _Recorder(TorchDispatchMode):
    """A recorder of modules' runs by hooks, of heads as the attention backend, and of reductions in its mode."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.trace = ModelTrace()
        self._running: list[str] = []
        # Outputs by their storage: kept, so that no other tensor gets the same.
        self._outputs: dict[int, tuple[str, Tensor]] = {}
        self.hooks = []
        for name, module in model.named_modules():
            self.hooks.append(module.register_forward_pre_hook(partial(self._enter_module, name), with_kwargs=True))
            self.hooks.append(module.register_forward_hook(self._leave_module))

    def _enter_module(self, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._running.append(name)
        first = next(iter((*args, *kwargs.values())), None)
        self.trace.inputs[name] = args, kwargs
        self.trace.calls.append((name, self._make_view(first) if isinstance(first, Tensor) else None))

    def _leave_module(self, _: nn.Module, args: Any, output: Any) -> None:
        name = self._running.pop()
        if isinstance(output, Tensor):
            self._outputs.setdefault(output.untyped_storage()._cdata, (name, output))

    def attend(self, call: AttentionCall) -> Tensor:
        _, heads, tokens, key_dim = call.query.shape
        value_dim, name = call.value.shape[-1], self._running[-1]
        self.trace.attention[name] = HeadSizes(heads, call.key.shape[1], key_dim, value_dim)
        self.trace.values[name] = self._make_view(call.value)
        return call.query.new_zeros((1, tokens, heads, value_dim))

    def keep_index(self, layer_idx: int, keys: Tensor) -> KeySource:
        return _TracedKeys(self.trace)

    def _make_view(self, tensor: Tensor) -> View:
        source, _ = self._outputs.get(tensor.untyped_storage()._cdata, ("", tensor))
        step = tensor.stride(-1) if tensor.dim() else 1
        return View(tuple(tensor.shape), source, int(tensor.storage_offset()), step)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name: str = func._schema.name.partition("::")[2]
        if name in _REDUCTIONS:
            parameters = func._schema.arguments
            values = {each.name: each.default_value for each in parameters if each.has_default_value()}
            values |= dict(zip((each.name for each in parameters), args, strict=False)) | kwargs
            given, shape = values.get(_REDUCTIONS[name]), args[0].shape
            if _REDUCTIONS[name] == "normalized_shape":
                sizes = tuple(given or ())
            else:  # all dimensions where it names none
                dims = [given] if isinstance(given, int) else given or range(len(shape))
                sizes = tuple(shape[dim] for dim in dims) if shape else ()
            self.trace.reductions.append(Reduction(self._running[-1], name, sizes))
        return func(*args, **kwargs)


def empty_copy(model: PreTrainedModel, device: str | None = None) -> PreTrainedModel:
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(model, memo)


def data_free_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy that runs under a FakeTensorMode."""
    twin = empty_copy(model)
    for module in twin.modules():
        if hasattr(module, "is_concatenated"):
            # Experts: of transformers' implementations the one with shapes that depend on no data, for any dtype.
            module.config._experts_implementation = "batched_mm"
    return twin


def trace_model(model: PreTrainedModel) -> ModelTrace:
    """Run a data-free copy under a FakeTensorMode; what its code raises on these shapes passes through."""
    recorder = _Recorder(model)
    tokens = torch.arange(_TOKENS, dtype=torch.int32)[None]
    cache = {"past_key_values": IndexCache(recorder)} if CacheNeeds.read_code(model).indexes else {}
    try:
        with torch.no_grad(), recorder:
            logits = model(
                input_ids=tokens, position_ids=tokens.clone(), use_cache=False, attention_backend=recorder, **cache
            ).logits
    finally:
        for hook in recorder.hooks:
            hook.remove()
    recorder.trace.logits_size = logits.shape[-1]
    return recorder.trace


def no_data() -> FakeTensorMode:
    """Return the mode in which tensors have shapes only; constants of a model's code may join in."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a plain linear layer, with torch's own arithmetic."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def is_below(name: str, parent: str) -> bool:
    return name.startswith(parent + ".")
