# SPDX-License-Identifier: Apache-2.0
"""Random functions of tensors whose results are whole numbers, so that no order of summation shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional


def _settled(x: Tensor) -> Tensor:
    """Whole numbers from others, which differ by what a function may be off by: of either the same one."""
    return (x * 8 + 0.3).floor()


# Of whole numbers whole numbers, small enough that no sum of them is rounded.
WHOLE_UNARY: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: -x,
    lambda x: x.abs() - 3,
    lambda x: x.relu(),
    lambda x: 5 - x * 2,
    lambda x: x.clamp(-2, 7),
    lambda x: x.bfloat16().to(x.dtype),
    lambda x: (x.int() * 3 & 15).to(x.dtype),
    lambda x: (x > 1).to(x.dtype),
    lambda x: torch.where(x < 0, x, 2),
    lambda x: x.masked_fill(x == 1, -4),
)
# Whole numbers again, where what is in between is not rounded to fewer bits.
WIDE_UNARY: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: (x / 3).round(),
    lambda x: _settled(x.abs().neg().exp()),
    lambda x: _settled((x / 7).tanh()),
    lambda x: _settled((x / 7).sigmoid()),
    lambda x: _settled(functional.silu(x / 7)),
    lambda x: _settled((x / 7).erf()),
    lambda x: _settled(x.softmax(-1)) if x.dim() else x,
    lambda x: _settled(functional.layer_norm(x, x.shape[-1:])) if x.dim() else x,
)
WHOLE_BINARY: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda x, y: x + y,
    lambda x, y: x - y,
    lambda x, y: x * y,
    lambda x, y: torch.maximum(x, y),
    lambda x, y: torch.minimum(x, y),
    lambda x, y: torch.where(x < y, x, y),
    lambda x, y: torch.where((x == y) | ~(x > 0), x, y + 1),
)
REDUCTIONS: tuple[Callable[[Tensor, tuple[int, ...], bool], Tensor], ...] = (
    lambda x, dims, keep: x.sum(dims, keep),
    lambda x, dims, keep: x.float().mean(dims, keep).round().to(x.dtype),
    lambda x, dims, keep: x.amax(dims, keep),
    lambda x, dims, keep: x.amin(dims, keep),
    lambda x, dims, keep: (x > 2).any(dims[0], keep).to(x.dtype),
    lambda x, dims, keep: (x > -2).all(dims[0], keep).to(x.dtype),
)


class Graph:
    """A random function: its operators in order, each with the numbers of its operands, beside their results."""

    def __init__(self, data: st.DataObject, inputs: list[Tensor]) -> None:
        self._data = data
        self.steps: list[tuple[Callable[..., Tensor], list[int]]] = []
        self.values = [*inputs]
        self._unary = WHOLE_UNARY + (WIDE_UNARY if inputs[0].dtype == torch.float32 else ())
        self.written: list[int] = []  # those that may be written to

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        values = [*inputs]
        for function, operands in self.steps:
            values.append(function(*(values[i] for i in operands)))
        return tuple(values[i] for i in self.outputs)

    def draw(self, strategy: st.SearchStrategy[Any]) -> Any:
        return self._data.draw(strategy)

    def add(self, function: Callable[..., Tensor], *operands: int) -> None:
        self.steps.append((function, [*operands]))
        self.values.append(function(*(self.values[i] for i in operands)))

    def any_value(self) -> int:
        """A recent one more often."""
        count = len(self.values)
        return self.draw(st.one_of(st.integers(max(0, count - 3), count - 1), st.integers(0, count - 1)))

    def grow(self) -> None:
        kinds = [self.unary, self.reduce, self.compare, self.join, self.write, *(self.binary, self.view) * 2]
        self.draw(st.sampled_from(kinds))()

    def finish(self) -> None:
        """All that nothing else depends on is a result."""
        used = {i for _, operands in self.steps for i in operands}
        self.outputs = [i for i in range(len(self.values)) if i not in used or i in self.written or i % 4 == 0]

    def unary(self) -> None:
        function = self.draw(st.sampled_from(self._unary))
        self.add(lambda x: function(x).clamp(-32, 32), self.any_value())

    def binary(self) -> None:
        first = self.any_value()
        joint = [_joint_shape(each.shape, self.values[first].shape) for each in self.values]
        fitting = [i for i, shape in enumerate(joint) if shape is not None and math.prod(shape) <= 20000]
        function = self.draw(st.sampled_from(WHOLE_BINARY))
        self.add(lambda x, y: function(x, y).clamp(-32, 32), first, self.draw(st.sampled_from(fitting)))

    def reduce(self) -> None:
        source = self.any_value()
        if self.values[source].dim():
            reduction = self._reduction(source, self.draw(st.booleans()))
            self.add(lambda x: reduction(x).clamp(-32, 32), source)

    def compare(self) -> None:
        """Elements with what is left of their rows, by way of memory or not."""
        source = self.any_value()
        if self.values[source].dim():
            reduction, function = self._reduction(source, True), self.draw(st.sampled_from(WHOLE_BINARY))
            self.add(lambda x: function(x + 1, reduction(x)).clamp(-32, 32), source)

    def _reduction(self, source: int, keep: bool) -> Callable[[Tensor], Tensor]:
        shape = self.values[source].shape
        dims = self.draw(st.lists(st.sampled_from(range(len(shape))), min_size=1, max_size=2, unique=True))
        function = self.draw(st.sampled_from(REDUCTIONS))
        return lambda x: function(x, tuple(dims), keep)

    def view(self) -> None:
        source = self.any_value()
        self.add(self.draw(st.sampled_from(list(_views(self.values[source].shape)))), source)

    def join(self) -> None:
        first = self.any_value()
        shape = self.values[first].shape
        if not shape or self.values[first].numel() > 20000:
            return
        dim = self.draw(st.integers(0, len(shape) - 1))
        others = [i for i, each in enumerate(self.values) if _fit_together(each.shape, shape, dim)]
        parts = [first, *self.draw(st.lists(st.sampled_from(others), max_size=2))]
        same = all(self.values[i].shape == shape for i in parts)
        join = torch.stack if same and self.draw(st.booleans()) else torch.cat
        self.add(lambda *parts: join(parts, dim), *parts)

    def write(self) -> None:
        """Into a copy of its own, or once more into one that there is, of which there may be views."""
        if self.written and self.draw(st.booleans()):
            target = self.draw(st.sampled_from(self.written))
        else:
            self.add(lambda x: x.clone(memory_format=torch.contiguous_format), self.any_value())
            target = len(self.values) - 1
            self.written.append(target)
        place = self.draw(st.sampled_from(list(_views(self.values[target].shape, slices=True))))
        shape = place(self.values[target]).shape
        sources = [i for i, each in enumerate(self.values) if i != target and _joint_shape(each.shape, shape) == shape]

        def write(x: Tensor, y: Tensor) -> Tensor:
            before = x * 2
            place(x).copy_((y + 1).expand(shape))
            return before - x

        if sources:
            self.add(write, target, self.draw(st.sampled_from(sources)))


def _joint_shape(left: torch.Size, right: torch.Size) -> torch.Size | None:
    try:
        return torch.broadcast_shapes(left, right)
    except RuntimeError:
        return None


def _fit_together(left: torch.Size, right: torch.Size, dim: int) -> bool:
    return len(left) == len(right) and all(i == dim or left[i] == right[i] for i in range(len(left)))


def _views(shape: torch.Size, *, slices: bool = False) -> Iterator[Callable[[Tensor], Tensor]]:
    """Looks at a tensor; `slices`: those that name parts of it alone."""
    yield lambda x: x.view(shape)
    for dim, size in enumerate(shape):
        yield lambda x, dim=dim: x.select(dim, -1)
        yield lambda x, dim=dim, size=size: x.narrow(dim, size // 2, size - size // 2)
        yield lambda x, dim=dim: x.transpose(dim, -1)
        if slices:
            continue
        index = torch.randint(0, size, (3,))
        yield lambda x, dim=dim, index=index: x.index_select(dim, index)
        yield lambda x, dim=dim: x.unsqueeze(dim)
        yield lambda x, dim=dim: x.chunk(2, dim)[-1]
        yield lambda x, dim=dim: x.unbind(dim)[0]
        yield lambda x, dim=dim: x[(*[slice(None)] * dim, slice(None, None, 2))]
        yield lambda x, dim=dim: x.unsqueeze(dim).expand(*shape[:dim], 2, *shape[dim:])
        yield lambda x, dim=dim: x.flatten(dim)
        yield lambda x, dim=dim, size=size: x.transpose(dim, -1).reshape(-1, size)
    if not slices:
        yield lambda x: x.reshape(-1)
        yield lambda x: x.squeeze()
        yield lambda x: x.permute(*range(1, len(shape)), 0) if shape else x
        yield lambda x: x.contiguous()
