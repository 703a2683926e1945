# SPDX-License-Identifier: Apache-2.0
"""Plans of random graphs, and of what graphs do with memory: the bits of torch, whatever the number of threads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from kernel_calls import Kernels, Planned, same_bits, threads
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
        kinds = (
            self.unary,
            self.binary,
            self.binary,
            self.reduce,
            self.compare,
            self.view,
            self.view,
            self.join,
            self.write,
        )
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
        fitting = [i for i, each in enumerate(self.values) if _meet(each, self.values[first])]
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
        sources = [i for i, each in enumerate(self.values) if i != target and _expands(each, shape)]

        def write(x: Tensor, y: Tensor) -> Tensor:
            before = x * 2
            place(x).copy_((y + 1).expand(shape))
            return before - x

        if sources:
            self.add(write, target, self.draw(st.sampled_from(sources)))


def _expands(tensor: Tensor, shape: torch.Size) -> bool:
    try:
        return torch.broadcast_shapes(tensor.shape, shape) == shape
    except RuntimeError:
        return False


def _meet(left: Tensor, right: Tensor) -> bool:
    try:
        return math.prod(torch.broadcast_shapes(left.shape, right.shape)) <= 20000
    except RuntimeError:
        return False


def _fit_together(left: torch.Size, right: torch.Size, dim: int) -> bool:
    return len(left) == len(right) and all(
        i == dim or a == b for i, (a, b) in enumerate(zip(left, right, strict=True))
    )


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


@examples(240)
@given(st.sampled_from((torch.float32, torch.bfloat16)), st.data())
def test_graphs_of_many_operators_give_the_bits_of_torch_with_any_number_of_threads(
    best_kernels: Kernels, dtype: torch.dtype, data: st.DataObject
) -> None:
    small, last = st.integers(1, 3), data.draw(st.sampled_from((1, 2, 3, 33, 300)))
    shapes = [(data.draw(small), data.draw(small), last), (last,), (data.draw(small), 1)]
    torch.manual_seed(data.draw(st.integers(0, 99)))
    inputs = [torch.randint(-5, 6, shape).to(dtype) for shape in shapes]
    graph = Graph(data, inputs)
    for _ in range(data.draw(st.integers(4, 16))):
        graph.grow()
    graph.finish()
    expected = graph(*inputs)
    planned = Planned(best_kernels, graph, inputs)
    for count in (1, 2, 3):
        with threads(count):
            for number, found, wanted in zip(graph.outputs, planned(*inputs), expected, strict=True):
                assert torch.equal(found, wanted), (number, found, wanted)


def test_large_maps_give_the_same_bits_with_any_number_of_threads(kernels: Kernels) -> None:
    def layer(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        scaled = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
        normed = weight * scaled.to(x.dtype)
        gated = functional.silu(normed) * y
        return gated, gated.softmax(-1), (gated + x).sum((0, 1)), gated.transpose(0, 1).amax(-1)

    inputs = [torch.randn(3, 250, 130).bfloat16(), torch.randn(250, 130).bfloat16(), torch.randn(130).bfloat16()]
    planned = Planned(kernels, layer, inputs)
    assert planned.calls_torch == []
    results = []
    for count in (1, 2, 3):
        with threads(count):
            results.append([each.clone() for each in planned(*inputs)])
    for result in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(result, results[0], strict=True))
    # Nor does it matter which rows there are, and where.
    order = torch.randperm(250)
    moved = planned(inputs[0][:, order], inputs[1][order], inputs[2])
    assert same_bits(moved[0], results[0][0][:, order]) and same_bits(moved[1], results[0][1][:, order])
    fewer = [inputs[0][:1, :7].contiguous(), inputs[1][:7].contiguous(), inputs[2]]
    small = Planned(kernels, layer, fewer)(*fewer)
    assert same_bits(small[0], results[0][0][:1, :7]) and same_bits(small[1], results[0][1][:1, :7])
    for found, exact in zip(results[0], layer(*(each.float() for each in inputs)), strict=True):
        torch.testing.assert_close(found.float(), exact, rtol=2**-7, atol=1e-3)


def test_constants_that_a_step_writes_to_are_new_in_each_step(best_kernels: Kernels) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        chosen, ones = torch.zeros_like(x), torch.ones(4)
        chosen.scatter_(0, x.argmax(0, keepdim=True), 1.0)
        ones.mul_(x.sum())
        return chosen == 0, ones

    planned = Planned(best_kernels, function, [torch.zeros(7)])
    for step in range(3):
        x = torch.randn(7) + step
        assert all(torch.equal(a, b) or torch.allclose(a, b) for a, b in zip(planned(x), function(x), strict=True))


@pytest.mark.parametrize("alone", [lambda y: y.reshape(-1), lambda y: y.contiguous()], ids=["reshape", "contiguous"])
def test_what_torch_copies_is_apart_from_what_it_was_copied_from(
    best_kernels: Kernels, alone: Callable[[Tensor], Tensor]
) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        kept = x.t() * 2  # which torch keeps transposed
        changed = alone(kept)
        changed.mul_(3)
        return kept + 1, changed - 1

    x = torch.randn(5, 7)
    planned = Planned(best_kernels, function, [x])
    assert all(torch.equal(found, expected) for found, expected in zip(planned(x), function(x), strict=True))
