# SPDX-License-Identifier: Apache-2.0
"""A layer with a recurrence, run by itself on random numbers: what it is asked, computes and reads is seen."""

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

from ....step.features.own_code.own_run import name_of
from ....step.features.recurrence.recurrence import ScanCall, ScanKind, scanning
from ....step.masks import UnsupportedModelError
from .blocks import filled, numbers
from .trace import Trace


def whole_numbers(module: nn.Module) -> dict[str, int]:
    """Whole numbers among a module's attributes, but for those of torch's own layers and the number of the layer."""
    if type(module).__module__.startswith("torch."):
        return {}
    return {name: value for name, value in vars(module).items() if type(value) is int and name != "layer_idx"}


@dataclass
class Seen:
    """One run.

    Attributes:
        taken: what the last linear layer is given.
        calls: of recurrences.
        norms: by the name of a module, what it was given and what it gave.
        linears: where gradients are wanted, what each linear layer before the last gave in each of its calls.
        read: sizes whose values the code asked for.
    """

    taken: list[Tensor] = field(default_factory=list)
    calls: list[ScanCall] = field(default_factory=list)
    norms: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    linears: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    read: dict[tuple[str, str], int] = field(default_factory=dict)
    layer_idx: int | None = None

    def enter(self, layer_idx: Any) -> None: ...

    def leave(self, layer_idx: Any) -> None: ...

    def scan(self, kind: ScanKind, call: ScanCall) -> Tensor:
        if kind == "selective_scan":
            raise UnsupportedModelError("a selective scan has no heads")
        self.calls.append(call)
        return _outputs(call)


def _outputs(call: ScanCall) -> Tensor:
    """Token by token, in operators whose derivatives are known."""
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

    def __init__(self, name: str, module: nn.Module, outer: str, trace: Trace) -> None:
        random = torch.Generator().manual_seed(0)
        self.name, self._module, self._outer = name, module, outer.removeprefix(f"{name}.")
        self.tensors = {f"{name}.{each}": numbers(tensor, random) for each, tensor in module.named_parameters()}
        self._args, self._kwargs = pytree.tree_map_only(Tensor, lambda each: numbers(each, random), trace.inputs[name])

    def run(
        self,
        tensors: Mapping[str, Tensor],
        sizes: Mapping[tuple[str, str], int] | None = None,
        norms: Mapping[str, Callable[..., Any]] | None = None,
        gradients: bool = False,
    ) -> tuple[Seen, nn.Module]:
        """With these parameters.

        Args:
            sizes: attributes that have other values, by module and name.
            norms: what stands for modules of these names.
            gradients: whether derivatives are asked for.
        """
        module, seen = filled(self._module, tensors, self.name), Seen()
        module.requires_grad_(gradients)
        for (path, attribute), size in (sizes or {}).items():
            setattr(module.get_submodule(path), attribute, size)
        outer: Any = module.get_submodule(self._outer)
        outer.forward = partial(_take, seen)
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
        with torch.set_grad_enabled(gradients), scanning(seen, _NoConvolutions()), _noting_reads(module, seen):
            module(*self._args, **self._kwargs)
        return seen, module


def _take(seen: Seen, x: Tensor) -> Tensor:
    seen.taken.append(x)
    return x


class _NoConvolutions:
    """Without a cache layers convolve by torch's own operator."""

    def convolve(self, *_: Any) -> Tensor:
        raise UnsupportedModelError("it convolves apart from its cache")

    before = convolve


@contextmanager
def _noting_reads(module: nn.Module, seen: Seen) -> Iterator[None]:
    """Notes which of a layer's sizes its code reads."""
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
    """Limits are left out: what is at its limit would depend on nothing."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        return args[0] if name_of(func) in ("clamp", "relu") else func(*args, **kwargs or {})
