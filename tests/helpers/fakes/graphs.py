# SPDX-License-Identifier: Apache-2.0
"""Small graphs for tests of what comes after lowering."""

from __future__ import annotations

from functools import cache

import torch
from lowered import lower_module
from torch import Tensor, nn

from optimum_neuron.targets.neuron.graphs.io import LoweredGraph


class _Step(nn.Module):
    def __init__(self, like: Tensor, ranks: int) -> None:
        super().__init__()
        self.kv_cache, self.model, self.tensor_parallel = nn.Module(), nn.Module(), nn.Module()
        self.kv_cache.register_buffer("key_0", torch.zeros_like(like))
        self.model.register_buffer("weight", torch.zeros_like(like))
        if ranks > 1:
            self.tensor_parallel.register_buffer("rank", torch.zeros_like(like, dtype=torch.int32))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        state = self.kv_cache.key_0.add_(x * self.model.weight)
        for rank in self.tensor_parallel.buffers():
            state.add_(rank.to(x.dtype))
        return (state + state,)


class _Copy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kv_cache = nn.Module()
        self.kv_cache.register_buffer("key_0", torch.zeros(1, 1, 1, 1))

    def forward(self, source: Tensor, destination: Tensor, length: Tensor) -> tuple[()]:
        state, total = self.kv_cache.key_0, source.float() * source.float() * destination.float() + length.float()
        state.copy_(state - state + total.view(1, 1, 1, 1))
        return ()


@cache
def step_graph(name: str = "token_generation", *, size: int = 2, ranks: int = 1) -> LoweredGraph:
    """A step of a model with one weight and one state, per element: `state += x * weight + rank`; returns it, doubled.

    Shapes are those of a KV cache: `[1, 1, 1, size]`. The rank is a weight, as in real graphs.
    """
    x = torch.zeros(1, 1, 1, size)
    return lower_module(_Step(x, ranks), {"decode.x": x}, ["decode.y"], name, "token_generation", ranks)


class _Swap(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        state, weight = self.buffers()
        before = state.clone()
        state.copy_(x)
        return before, weight.clone(), x.clone()


@cache
def swap_graph(dtype: str) -> LoweredGraph:
    """A graph that computes nothing: it returns its state, weight and input, all of a type, and keeps the input as the state."""
    module, x = _Swap(), torch.zeros(1, 1, 1, 2).to(getattr(torch, dtype))
    for name in ("kv_cache", "model"):
        module.add_module(name, nn.Module())
        module.get_submodule(name).register_buffer(f"of_{dtype}", x.clone())
    return lower_module(module, {f"{dtype}.x": x}, ["state", "weight", "x"], f"swap_{dtype}", "token_generation")


@cache
def copy_graph(*, ranks: int = 1) -> LoweredGraph:
    """In place of a copy of slots: the state, of one element, becomes `source * source * destination + length`."""
    names = ("copy.source", "copy.destination", "copy.length")
    inputs = {each: torch.zeros(1, dtype=torch.int32) for each in names}  # one tensor would be one input
    return lower_module(_Copy(), inputs, [], "copy_slot", "copy_slot", ranks)
