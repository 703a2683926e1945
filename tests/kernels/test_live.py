# SPDX-License-Identifier: Apache-2.0
"""What runs leave out: steps for fewer tokens give live tokens the bits that they have with all, in random functions of whole numbers and in layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from kernel_calls import Kernels, Planned, threads
from torch import Tensor, nn
from torch.nn import functional

from optimum_neuron.kernels.run.bound_plan import count_state_steps
from optimum_neuron.kernels.steps.operands import Tokens
from optimum_neuron.kernels.steps.steps import Sample
from optimum_neuron.step.sampling.sampler import sample
from optimum_neuron.targets.cpu.ops import OPS


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
    lambda x: (x.int() // 3 - x.int() % 4).to(x.dtype),
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
        dims = self.draw(st.lists(st.sampled_from(range(len(shape))), min_size=1, max_size=3, unique=True))
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


TOKENS = 6


@examples(200)
@given(st.sampled_from((torch.float32, torch.bfloat16)), st.booleans(), st.data())
def test_random_graphs_have_the_bits_of_torch_for_live_tokens_with_any_number_of_threads(
    best_kernels: Kernels, dtype: torch.dtype, has_tokens: bool, data: st.DataObject
) -> None:
    small, last = st.integers(1, 3), data.draw(st.sampled_from((1, 2, 3, TOKENS, 33, 300)))
    first, second = (TOKENS, TOKENS) if has_tokens else (data.draw(small), data.draw(small))
    others = ((second, 5), (5,)) if has_tokens else ((last,), (second, 1))
    shapes = ((first, data.draw(small), last), *others)
    torch.manual_seed(data.draw(st.integers(0, 99)))
    inputs = [torch.randint(-5, 6, shape).to(dtype) for shape in shapes]
    graph = Graph(data, inputs)
    for _ in range(data.draw(st.integers(4, 16))):
        graph.grow()
    graph.finish()
    if has_tokens:
        graph.outputs = [i for i, each in enumerate(graph.values) if each.dim() and len(each) == TOKENS]
    planned, expected = Planned(best_kernels, graph, inputs, TOKENS if has_tokens else 0), graph(*inputs)
    for live in (*range(1, TOKENS + 1), 1 << 40) if has_tokens else (1 << 40,) * 3:
        with threads(data.draw(st.integers(1, 3))):
            results = planned(*inputs, live=live)
        for number, found, wanted in zip(graph.outputs, results, expected, strict=True):
            found, wanted = (found[:live], wanted[:live]) if has_tokens else (found, wanted)
            assert torch.equal(found, wanted), (number, live, found, wanted)


class _Layer(nn.Module):
    """What layers do with tokens, those of a table among it, and the choice of rows at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(50, 32), nn.Linear(32, 48), nn.Linear(48, 32)
        self.requires_grad_(False)

    def forward(self, ids: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        x = self.table(ids)[None]
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        heads = self.up(normed).view(1, TOKENS, 3, 16).transpose(1, 2)
        turned = torch.cat([-heads[..., 8:], heads[..., :8]], -1) * heads
        each = turned.transpose(1, 2).reshape(-1, 16)  # several rows of a token, as gated norms have them
        each = each * torch.rsqrt(each.square().mean(-1, keepdim=True) + 1e-6)
        x = x + self.down(functional.silu(each.view(1, TOKENS, 48)))
        scores, chosen = torch.topk(x[0], 4)
        return (x[:, OPS.output_rows(rows)][0] + 1, scores.softmax(-1), chosen.int())


def test_each_step_of_a_layer_ends_at_the_last_live_token(kernels: Kernels) -> None:
    inputs = [torch.randint(0, 50, (TOKENS,), dtype=torch.int32), torch.tensor([0, 1, 1, 2, 2, 3], dtype=torch.int32)]
    planned = Planned(kernels, _Layer(), inputs, TOKENS)
    assert all(step.tokens is not None for step in planned.plan.steps)
    whole = planned(*inputs)
    for live in range(1, TOKENS + 1):
        fewer = planned(*inputs, live=live)
        assert all(torch.equal(a[:live], b[:live]) for a, b in zip(fewer, whole, strict=True))


def _turned(tokens: Tensor) -> Tensor:
    """What a Map rotates as one row, though each element is a token's."""
    return torch.cat([-tokens[3:], tokens[:3]], -1)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 2 + (x * 2).sum(0),
        lambda x: (x * 2)[torch.tensor([5, 4, 3, 2, 1, 0])] + 1,
        lambda x: (x * 2).view(2, 3, 4).transpose(0, 1).reshape(6, 4) + 1,
        lambda x: (x * 2).t().contiguous().view(6, 4) + 1,
        lambda x: torch.cat([(x * 2)[1:], x[:1]]),
        lambda x: (x * 2) @ (x * 2).t(),
        lambda x: _turned(x[:, 0] * 2),
    ],
)
def test_what_tokens_take_from_one_another_is_computed_for_all(
    best_kernels: Kernels, function: Callable[[Tensor], Tensor]
) -> None:
    x = torch.arange(24.0).view(TOKENS, 4)
    planned = Planned(best_kernels, lambda x: (function(x),), [x], TOKENS)
    for live in range(1, TOKENS + 1):
        assert torch.equal(planned(x, live=live)[0][:live], function(x)[:live])


def test_tokens_are_chosen_for_live_rows_alone_in_one_step(kernels: Kernels) -> None:
    table = torch.randn(TOKENS, 300)
    inputs = [table, torch.tensor([[0, 1.0, 1.0, 0.0]] * TOKENS), torch.rand(TOKENS)]
    planned = Planned(kernels, lambda x, params, uniforms: (OPS.sample(x, params, uniforms),), inputs, TOKENS)
    sampled = [step for step in planned.plan.steps if isinstance(step, Sample)]
    assert [step.tokens for step in sampled] == [Tokens(0, TOKENS)]
    expected = sample(*inputs)
    for live in range(1, TOKENS + 1):
        assert torch.equal(planned(*inputs, live=live)[0][:live], expected[:live])


class _Keeping(nn.Module):
    """Writes to its state amid what its output needs."""

    def __init__(self, write: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self._write = write
        self.up = nn.Linear(8, 8).requires_grad_(False)
        self.register_buffer("state", torch.zeros(3, 8))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        y = self.up(x) * 2
        self._write(self.state, y)
        return (self.up(y).softmax(-1) + self.state.sum(),)


@pytest.mark.parametrize(
    "write",
    [
        lambda state, y: state.copy_(y * 3),
        lambda state, y: state[1:].add_(y[:2]),
    ],
    ids=["all", "in place"],
)
def test_whatever_writes_to_a_state_is_run(best_kernels: Kernels, write: Callable[[Tensor, Tensor], object]) -> None:
    module, x = _Keeping(write), torch.randn(3, 8)
    planned = Planned(best_kernels, module, [x])
    assert 0 < count_state_steps(planned.plan) < len(planned.plan.steps)
    found = []
    by_module = lambda inputs, _: module(*map(torch.from_numpy, inputs))  # noqa: E731
    for run in (planned._bound.run, planned._bound.run_for_states, by_module):
        module.state.fill_(0.25)
        run([x.numpy()], 3)
        found.append(module.state.clone())
    assert torch.equal(found[0], found[1])
    assert torch.allclose(found[0], found[2], atol=1e-6) and not torch.equal(found[0], torch.full((3, 8), 0.25))
