# SPDX-License-Identifier: Apache-2.0
"""Blocks of linear layers that ranks share where the model has no plan: feed-forward layers, and short convolutions.

In such a block the last linear layer sums over places, and each place follows from that place of the other layers' results: of a
convolution's channels as well as of gate and up. A block's code is not read: parts of it run on random numbers, and have to add up
to the whole.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from .rules import Section, ShardRule, even, packed
from .styles import is_linear
from .trace import ModelTrace


# In float32, of the largest result: sums of as many terms as a layer is wide. What is wrong is off by about all of it.
_ROUNDING = 1e-4


@dataclass(frozen=True)
class Block:
    """A module with parts that add up to it.

    Attributes:
        inner: its linear layers but the last, and how many values each gives per place: all places' first, then all second ones.
        outer: its last linear layer.
        places: the inputs of that.
        others: parameters of a value or a filter per place.
    """

    name: str
    inner: dict[str, int]
    outer: str
    places: int
    others: tuple[str, ...]

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
    """Return the blocks of a model without data that so many ranks can share, without attention.

    Of blocks with the same classes, sizes and activations, one is tried.
    """
    found: list[Block] = []
    tried: dict[str, bool] = {}
    called = [call.name for call in trace.calls]
    linears = [name for name in called if is_linear(model.get_submodule(name))]
    for name in dict.fromkeys(linear.rpartition(".")[0] for linear in linears):
        own = [linear for linear in linears if linear.rpartition(".")[0] == name]
        block = None if name in trace.attention else _make_candidate(model, name, own)
        if block is None or called.count(name) != 1 or len(set(own)) < len(own):
            continue
        module = model.get_submodule(name)
        look = f"{module!r} {[tuple(each.shape) for each in module.parameters()]}"
        if look not in tried:
            tried[look] = adds_up(block, module, world_size, *trace.inputs[name])
        if tried[look]:
            found.append(block)
    return found


def _make_candidate(model: nn.Module, name: str, linears: list[str]) -> Block | None:
    """Return a block by sizes alone, or None."""
    *inner, outer = linears
    module, layers = model.get_submodule(name), {each: cast(nn.Linear, model.get_submodule(each)) for each in linears}
    places, outputs = layers[outer].in_features, [layers[each].out_features for each in inner]
    parameters = {f"{name}.{each}": tensor for each, tensor in module.named_parameters()}
    others = [each for each in parameters if each.rpartition(".")[0] not in linears]
    alike = all(parameters[each].shape[:1] == (places,) for each in others)
    if not inner or any(size % places for size in outputs) or not alike or any(True for _ in module.buffers()):
        return None
    values = dict(zip(inner, (size // places for size in outputs), strict=True))
    return Block(name, values, outer, places, tuple(others))


def adds_up(block: Block, module: nn.Module, world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the results of a module's parts, on random numbers, sum up to that of the whole.

    Args:
        args, kwargs: the model's arguments; of tensors, the shapes count.
    """
    with unset_fake_temporarily(), torch.no_grad():
        random = torch.Generator().manual_seed(0)
        tensors = {
            f"{block.name}.{name}": random_numbers(tensor, random) for name, tensor in module.named_parameters()
        }
        if f"{block.outer}.bias" in tensors:
            tensors[f"{block.outer}.bias"].zero_()  # is added once, after the sum
        args, kwargs = pytree.tree_map_only(Tensor, lambda each: random_numbers(each, random), (args, kwargs))
        rules = {name: ShardRule(dim, sections) for name, dim, sections in block.rules(world_size)}
        try:
            whole = fill_module(module, tensors, block.name)(*args, **kwargs)
            total = torch.zeros(())
            for rank in range(world_size):
                part = {
                    name: rules[name].shard(tensor, rank, world_size) if name in rules else tensor
                    for name, tensor in tensors.items()
                }
                total = total + fill_module(module, part, block.name)(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError, AttributeError):
            return False  # its code counts on the whole
        return total.shape == whole.shape and bool((total - whole).abs().max() <= _ROUNDING * whole.abs().max())


def random_numbers(tensor: Tensor, random: torch.Generator) -> Tensor:
    """Return random numbers of a tensor's shape, so small that products of many are about 1; zeros of whole numbers."""
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    terms = tensor.shape[-1] if tensor.dim() > 1 else 1
    return torch.randn(tensor.shape, generator=random) / math.sqrt(terms)


def fill_module(module: nn.Module, tensors: Mapping[str, Tensor], prefix: str) -> nn.Module:
    """Return the module with other tensors, by names that begin with `prefix`."""
    memo: dict[int, Any] = {
        id(each): nn.Parameter(tensors[f"{prefix}.{name}"], requires_grad=False)
        for name, each in module.named_parameters()
    }
    return copy.deepcopy(module, memo)
