# SPDX-License-Identifier: Apache-2.0
"""Runs of a layer with a recurrence by itself on random numbers, which record its inputs, results and reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ....errors import UnsupportedModelError
from ....step.features.convolution.state import ConvolutionState
from ....step.features.recurrence.recurrence import ScanCall, ScanKind
from ....step.features.recurrence.state import RecurrentState
from ....step.serving import Backends, name_of, serving
from .blocks import fill_module, random_numbers
from .trace import ModelTrace


def whole_numbers(module: nn.Module) -> dict[str, int]:
    """Return the whole numbers among a module's attributes, without those of torch's own layers and the number of the layer."""
    if type(module).__module__.startswith("torch."):
        return {}
    return {name: value for name, value in vars(module).items() if type(value) is int and name != "layer_idx"}


@dataclass
class LayerRun:
    """A run of a layer.

    Attributes:
        taken: inputs of the last linear layer.
        calls: of recurrences.
        norms: inputs and output of each other module, by its name.
        linears: where gradients are wanted, the results of each linear layer before the last.
        read: sizes that the code read, and their values.
    """

    taken: list[Tensor] = field(default_factory=list)
    calls: list[ScanCall] = field(default_factory=list)
    norms: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    linears: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    read: dict[tuple[str, str], int] = field(default_factory=dict)
    layer_idx: int | None = None

    def enter_layer(self, layer_idx: Any) -> None: ...

    def leave_layer(self, layer_idx: Any) -> None: ...

    def scan(self, kind: ScanKind, call: ScanCall) -> Tensor:
        if kind == "selective_scan":
            raise UnsupportedModelError("a selective scan has no heads")
        self.calls.append(call)
        return _scan_tokens(call)


def _scan_tokens(call: ScanCall) -> Tensor:
    """Scan token by token, in operators with known derivatives."""
    query, key = call.over_heads(call.query), call.over_heads(call.key)
    decay = call.decay[..., None] if call.decay.dim() == 2 else call.decay
    state, outputs = torch.zeros(()), list[Tensor]()
    for token, value in enumerate(call.value):
        state = state * decay[token].exp()[..., None]
        if call.beta is not None:
            value = call.beta[token][:, None] * (value - (state * key[token][..., None]).sum(1))
        state = state + key[token][..., None] * value[:, None]
        outputs.append((state * query[token][..., None]).sum(1))
    return torch.stack(outputs)


class RandomLayer:
    """A layer on random numbers."""

    def __init__(self, name: str, module: nn.Module, outer: str, trace: ModelTrace) -> None:
        random = torch.Generator().manual_seed(0)
        self.name, self._module, self._outer = name, module, outer.removeprefix(f"{name}.")
        self.tensors = {f"{name}.{each}": random_numbers(tensor, random) for each, tensor in module.named_parameters()}
        self._args, self._kwargs = pytree.tree_map_only(
            Tensor, lambda each: random_numbers(each, random), trace.inputs[name]
        )

    def run_layer(
        self,
        tensors: Mapping[str, Tensor],
        sizes: Mapping[tuple[str, str], int] | None = None,
        norms: Mapping[str, Callable[..., Any]] | None = None,
        gradients: bool = False,
    ) -> tuple[LayerRun, nn.Module]:
        """Run with these parameters.

        Args:
            sizes: attributes with other values, by module and name.
            norms: replacements of modules of these names.
            gradients: whether derivatives are wanted.
        """
        module, seen = fill_module(self._module, tensors, self.name), LayerRun()
        module.requires_grad_(gradients)
        for (path, attribute), size in (sizes or {}).items():
            setattr(module.get_submodule(path), attribute, size)
        outer: Any = module.get_submodule(self._outer)
        outer.forward = partial(_take_input, seen)
        for path, part in module.named_modules():
            if norms and path in norms:
                part.forward = norms[path]
            if gradients and isinstance(part, nn.Linear) and path != self._outer:
                part.register_forward_hook(lambda *given, path=path: seen.linears[path].append(given[-1]))
            if path and not isinstance(part, (nn.Linear, nn.Conv1d)):
                part.register_forward_hook(
                    lambda _, args, kwargs, output, path=path: seen.norms.update({path: ((args, kwargs), output)}),
                    with_kwargs=True,
                )
        backends = Backends({RecurrentState: seen, ConvolutionState: _NoConvolutions()})
        with torch.set_grad_enabled(gradients), serving(backends), _noting_reads(module, seen):
            module(*self._args, **self._kwargs)
        return seen, module


def _take_input(seen: LayerRun, x: Tensor) -> Tensor:
    seen.taken.append(x)
    return x


class _NoConvolutions:
    """A refusal of convolutions apart from the cache: without one layers convolve by torch's own operator."""

    def convolve(self, *_: Any) -> Tensor:
        raise UnsupportedModelError("it convolves apart from its cache")

    read_before = convolve


@contextmanager
def _noting_reads(module: nn.Module, seen: LayerRun) -> Iterator[None]:
    """Note the sizes that a layer's code reads."""
    parts = {part: (path, whole_numbers(part), type(part)) for path, part in module.named_modules()}
    for part, (path, sizes, kind) in parts.items():
        if sizes:

            def get(self: Any, name: str, path: str = path, sizes: dict[str, int] = sizes) -> Any:
                if name in sizes:
                    seen.read[path, name] = sizes[name]
                return object.__getattribute__(self, name)

            part.__class__ = type(kind.__name__, (kind,), {"__getattribute__": get, "__module__": kind.__module__})
    try:
        yield
    finally:
        for part, (_, _, kind) in parts.items():
            part.__class__ = kind


class Unlimited(TorchFunctionMode):
    """A mode without limits: a number at its limit would depend on nothing."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        return args[0] if name_of(func) in ("clamp", "relu") else func(*args, **kwargs or {})
