# SPDX-License-Identifier: Apache-2.0
"""Layers that run by themselves on random numbers: what a rank's part has to compute is found without reading a layer's code.

A block of linear layers is shared where the model has no plan: a feed-forward layer, or a short convolution. Its last linear layer sums over
places, and each place follows from that place of the other layers' results, of a convolution's channels as well as of gate and up.
Parts of it have to add up to the whole. A layer with a recurrence also records its inputs, results and reads, for recurrences.py.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from ....errors import UnsupportedModelError
from ....step.features.convolution.state import ConvolutionState
from ....step.features.recurrence.recurrence import ScanCall, ScanKind
from ....step.features.recurrence.state import RecurrentState
from ....step.serving import Backends, name_of, serving
from .plan import Section, ShardRule, even, packed
from .trace import ModelTrace, is_linear


# In float32, of the largest number: sums of as many terms as a layer is wide. What is wrong is off by about all of it.
_ROUNDING = 1e-4
# What a layer's code raises where it counts on the whole.
CODE_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError)


@dataclass(frozen=True)
class Block:
    """A module with parts that add up to it."""

    name: str
    # Its linear layers but the last, and how many values each gives per place: all places' first, then all second ones.
    inner: dict[str, int]
    outer: str  # its last linear layer
    places: int  # the inputs of that
    others: tuple[str, ...]  # parameters of a value or a filter per place

    def rules(self, world_size: int) -> Iterator[tuple[str, int, tuple[Section, ...]]]:
        """Yield parameters to cut, the dimension, and the sections; also those that a module lacks."""
        for layer, values in self.inner.items():
            sections = packed(values * self.places, values, world_size)
            yield f"{layer}.weight", 0, sections
            yield f"{layer}.bias", 0, sections
        yield f"{self.outer}.weight", 1, (even(self.places, world_size),)
        for name in self.others:
            yield name, 0, (even(self.places, world_size),)


def find_blocks(model: PreTrainedModel, trace: ModelTrace, world_size: int) -> list[Block]:
    """Return blocks without attention that so many ranks can share; of those with the same classes, sizes and activations one is tried."""
    found: list[Block] = []
    tried: dict[str, bool] = {}
    called = trace.called
    linears = [name for name in called if is_linear(model.get_submodule(name))]
    for name in dict.fromkeys(linear.rpartition(".")[0] for linear in linears):
        own = [linear for linear in linears if linear.rpartition(".")[0] == name]
        (*inner, outer), module = own, model.get_submodule(name)
        if not inner or name in trace.attention or called.count(name) != 1 or len(set(own)) < len(own):
            continue
        places: Any = model.get_submodule(outer).in_features
        outputs = {each: cast(int, model.get_submodule(each).out_features) for each in inner}
        parameters = {f"{name}.{each}": tensor for each, tensor in module.named_parameters()}
        others = tuple(each for each in parameters if each.rpartition(".")[0] not in own)
        alike = all(parameters[each].shape[:1] == (places,) for each in others)
        if any(size % places for size in outputs.values()) or not alike or any(True for _ in module.buffers()):
            continue
        block = Block(name, {each: size // places for each, size in outputs.items()}, outer, places, others)
        look = f"{module!r} {[tuple(each.shape) for each in module.parameters()]}"
        if look not in tried:
            tried[look] = adds_up(block, module, world_size, trace)
        if tried[look]:
            found.append(block)
    return found


def adds_up(block: Block, module: nn.Module, world_size: int, trace: ModelTrace) -> bool:
    """Return whether the results of a module's parts, on random numbers, sum up to that of the whole."""
    with unset_fake_temporarily(), torch.no_grad():
        layer = RandomLayer(block.name, module, block.outer, trace)
        if f"{block.outer}.bias" in layer.tensors:
            layer.tensors[f"{block.outer}.bias"].zero_()  # is added once, after the sum
        rules = {name: ShardRule(dim, sections) for name, dim, sections in block.rules(world_size)}
        parts = [shard_tensors(layer.tensors, rules, rank, world_size) for rank in range(world_size)]
        try:
            whole, *outputs = (layer.fill(each)(*layer.args, **layer.kwargs) for each in (layer.tensors, *parts))
            return is_close(torch.stack(outputs).sum(0), whole)
        except CODE_ERRORS:
            return False


def is_close(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and bool((found - expected).abs().max() <= _ROUNDING * expected.abs().max())


def shard_tensors(
    tensors: Mapping[str, Tensor], rules: Mapping[str, ShardRule], rank: int, world_size: int
) -> dict[str, Tensor]:
    cuts = {name: rules[name].shard(tensors[name], rank, world_size) for name in rules.keys() & tensors.keys()}
    return {**tensors, **cuts}


def random_like(values: Any, random: torch.Generator) -> Any:
    """Return random numbers in place of tensors, so small that products of many are about 1; zeros of whole numbers."""

    def make_random(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        terms = tensor.shape[-1] if tensor.dim() > 1 else 1
        return torch.randn(tensor.shape, generator=random) / math.sqrt(terms)

    return pytree.tree_map_only(Tensor, make_random, values)


def whole_numbers(module: nn.Module) -> dict[str, int]:
    """Return the whole numbers among a module's attributes, without those of torch's own layers and the number of the layer."""
    if type(module).__module__.startswith("torch."):
        return {}
    return {name: value for name, value in vars(module).items() if type(value) is int and name != "layer_idx"}


@dataclass
class LayerRun:
    taken: list[Tensor] = field(default_factory=list)  # inputs of the last linear layer
    calls: list[ScanCall] = field(default_factory=list)  # of recurrences
    norms: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # inputs and output of each other module, by name
    # Where gradients are wanted, the results of each linear layer before the last.
    linears: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    read: dict[tuple[str, str], int] = field(default_factory=dict)  # sizes that the code read, and their values
    layer_idx: int | None = None

    def take_input(self, x: Tensor) -> Tensor:
        self.taken.append(x)
        return x

    def enter_layer(self, layer_idx: Any) -> None: ...

    def leave_layer(self, layer_idx: Any) -> None: ...

    def scan(self, kind: ScanKind, call: ScanCall) -> Tensor:
        if kind == "selective_scan":
            raise UnsupportedModelError("a selective scan has no heads")
        self.calls.append(call)
        # Token by token, in operators with known derivatives.
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
    def __init__(self, name: str, module: nn.Module, outer: str, trace: ModelTrace) -> None:
        random = torch.Generator().manual_seed(0)
        self.name, self._module, self._outer = name, module, outer.removeprefix(f"{name}.")
        tensors = {f"{name}.{each}": tensor for each, tensor in module.named_parameters()}
        self.tensors: dict[str, Tensor] = random_like(tensors, random)
        self.args, self.kwargs = random_like(trace.inputs[name], random)

    def fill(self, tensors: Mapping[str, Tensor]) -> nn.Module:
        """Return the module with other tensors."""
        memo: dict[int, Any] = {}
        for name, each in self._module.named_parameters():
            memo[id(each)] = nn.Parameter(tensors[f"{self.name}.{name}"], requires_grad=False)
        return copy.deepcopy(self._module, memo)

    def run_layer(
        self,
        tensors: Mapping[str, Tensor],
        sizes: Mapping[tuple[str, str], int] | None = None,
        norms: Mapping[str, Callable[..., Any]] | None = None,
        gradients: bool = False,
    ) -> tuple[LayerRun, nn.Module]:
        """Run with these parameters, with other values of attributes by module and name, and with replacements of modules."""
        module, seen = self.fill(tensors), LayerRun()
        module.requires_grad_(gradients)
        for (path, attribute), size in (sizes or {}).items():
            setattr(module.get_submodule(path), attribute, size)
        for path, part in module.named_modules():
            if path == self._outer:
                part.forward = seen.take_input
            elif norms and path in norms:
                part.forward = norms[path]
            elif gradients and isinstance(part, nn.Linear):
                part.register_forward_hook(lambda *given, path=path: seen.linears[path].append(given[-1]))
            if path and not isinstance(part, (nn.Linear, nn.Conv1d)):
                part.register_forward_hook(
                    lambda _, args, kwargs, output, path=path: seen.norms.update({path: ((args, kwargs), output)}),
                    with_kwargs=True,
                )
        backends = Backends({RecurrentState: seen, ConvolutionState: _NoConvolutions()})
        with torch.set_grad_enabled(gradients), serving(backends), _noting_reads(module, seen):
            module(*self.args, **self.kwargs)
        return seen, module


class _NoConvolutions:
    """A refusal of convolutions apart from the cache: without one layers convolve by torch's own operator."""

    def convolve(self, *_: Any) -> Tensor:
        raise UnsupportedModelError("it convolves apart from its cache")

    read_before = convolve


@contextmanager
def _noting_reads(module: nn.Module, seen: LayerRun) -> Iterator[None]:
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
