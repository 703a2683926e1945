# SPDX-License-Identifier: Apache-2.0
"""What a model does in one forward pass: seen on a copy without data, so no weight is read or computed with."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ....step.features.selected_keys.index_keys import KeySource, ScoresOf
from ....step.features.selected_keys.slot_index import AllKeys
from ....step.interface import AttentionCall
from ....step.model_cache import CacheNeeds, IndexCache
from .reductions import Reduction, Reductions


_TOKENS = 2


@dataclass(frozen=True)
class HeadSizes:
    """One attention layer as the attention interface sees it."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class View:
    """Where a tensor comes from.

    Attributes:
        source: the module whose output it is, or a view of; empty where other code made it.
        offset, step: where its last dimension begins in that output, and how far apart its values are there.
    """

    shape: tuple[int, ...]
    source: str
    offset: int
    step: int


@dataclass(frozen=True)
class ModuleCall:
    """A module's run, and its first input; None where that is no tensor."""

    name: str
    first: View | None


@dataclass
class Trace:
    """One forward pass.

    Attributes:
        calls: every module's runs, in the order in which they began.
        attention: heads by the name of the module that called the attention interface.
        values: what it gave as values, likewise.
        reductions: sums, norms and the like over a dimension.
        logits_size: logits per token.
        inputs: arguments and keywords of each module's last run.
        selecting_heads: heads of a layer that select keys, each by itself; 1 where all heads attend to the same, or to all.
    """

    calls: list[ModuleCall] = field(default_factory=list)
    inputs: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    attention: dict[str, HeadSizes] = field(default_factory=dict)
    values: dict[str, View] = field(default_factory=dict)
    reductions: list[Reduction] = field(default_factory=list)
    logits_size: int = 0
    selecting_heads: int = 1


@dataclass(frozen=True)
class _TracedKeys(AllKeys):
    """Tells how many heads select."""

    trace: Trace

    def top(self, scores: Tensor, of: ScoresOf, count: int) -> Any:
        self.trace.selecting_heads = max(self.trace.selecting_heads, scores.shape[1])
        return super().top(scores, of, count)


class _Recorder:
    """Hooks that note each module's run, and the attention backend that notes the heads."""

    def __init__(self, model: nn.Module) -> None:
        self.trace = Trace()
        self._running: list[str] = []
        # Outputs by their storage: kept, so that no other tensor gets the same.
        self._outputs: dict[int, tuple[str, Tensor]] = {}
        self._hooks = [hook for name, module in model.named_modules() for hook in self._hook(name, module)]

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _hook(self, name: str, module: nn.Module) -> Iterator[RemovableHandle]:
        yield module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True)
        yield module.register_forward_hook(partial(self._leave, name))

    def _enter(self, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._running.append(name)
        first = next(iter((*args, *kwargs.values())), None)
        self.trace.inputs[name] = args, kwargs
        self.trace.calls.append(ModuleCall(name, self._view(first) if isinstance(first, Tensor) else None))

    def _leave(self, name: str, _: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()
        if isinstance(output, Tensor):
            self._outputs.setdefault(_storage(output), (name, output))

    def attend(self, call: AttentionCall) -> Tensor:
        _, heads, tokens, key_dim = call.query.shape
        value_dim, name = call.value.shape[-1], self._running[-1]
        self.trace.attention[name] = HeadSizes(heads, call.key.shape[1], key_dim, value_dim)
        self.trace.values[name] = self._view(call.value)
        return call.query.new_zeros((1, tokens, heads, value_dim))

    def keep_index(self, layer_idx: int, keys: Tensor) -> KeySource:
        """Every rank keeps all of them."""
        return _TracedKeys(self.trace)

    def reduced(self, reduction: str, sizes: tuple[int, ...]) -> None:
        self.trace.reductions.append(Reduction(self._running[-1], reduction, sizes))

    def _view(self, tensor: Tensor) -> View:
        source, _ = self._outputs.get(_storage(tensor), ("", tensor))
        step = tensor.stride(-1) if tensor.dim() else 1
        return View(tuple(tensor.shape), source, int(tensor.storage_offset()), step)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def data_free_copy(model: PreTrainedModel) -> PreTrainedModel:
    """The model's modules with tensors that have shapes only; to be called and used under a FakeTensorMode."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty(tensor.shape, dtype=tensor.dtype)
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
    twin: PreTrainedModel = copy.deepcopy(model, memo)
    for module in twin.modules():
        if hasattr(module, "is_concatenated"):
            # Experts: of transformers' implementations the one whose shapes depend on no data, for any dtype.
            module.config._experts_implementation = "batched_mm"
    return twin


def trace_model(model: PreTrainedModel) -> Trace:
    """Runs a data-free copy; to be called under a FakeTensorMode.

    Raises:
        RuntimeError, TypeError, ValueError: the model's code fails on these shapes.
    """
    recorder = _Recorder(model)
    tokens = torch.arange(_TOKENS, dtype=torch.int32)[None]
    cache = {"past_key_values": IndexCache(recorder)} if CacheNeeds.of(model).indexes else {}
    try:
        with torch.no_grad(), Reductions(recorder.reduced):
            logits = model(
                input_ids=tokens, position_ids=tokens.clone(), use_cache=False, attention_backend=recorder, **cache
            ).logits
    finally:
        recorder.remove_hooks()
    recorder.trace.logits_size = logits.shape[-1]
    return recorder.trace


def no_data() -> FakeTensorMode:
    """The mode in which tensors have shapes only; constants of a model's code may join in."""
    return FakeTensorMode(allow_non_fake_inputs=True)
