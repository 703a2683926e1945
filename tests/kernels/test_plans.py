# SPDX-License-Identifier: Apache-2.0
"""Plans of random graphs, and of what graphs do with memory: the bits of torch, whatever the number of threads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from kernel_calls import Kernels, Planned, same_bits, threads
from random_graphs import Graph
from torch import Tensor
from torch.nn import functional

from optimum_neuron.kernels.lower.arena import buffers_of, list_replaceable


@examples(120)
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


def test_equal_constants_are_stored_once(best_kernels: Kernels) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        first, second = (torch.ones(5, 5).tril() for _ in range(2))
        zero, minus = torch.tensor([0.0] * 5), torch.tensor([-0.0] * 5)
        return x @ first, x @ second, x.copysign(zero), x.copysign(minus)

    x = torch.randn(5, 5)
    planned = Planned(best_kernels, function, [x])
    assert sorted(each.bytes for each in planned.plan.buffers if each.kind == "constant") == [20, 20, 100]
    assert all(torch.equal(found, expected) for found, expected in zip(planned(x), function(x), strict=True))


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


def test_a_result_takes_the_place_of_what_nobody_else_reads(kernels: Kernels) -> None:
    def layers(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        kept = functional.linear(x, weight)
        residual = kept + functional.linear(kept, weight)
        normed = residual * residual.square().sum(-1, keepdim=True)
        added = functional.linear(normed, weight)
        twice, thrice = added * 2, added * 3
        turned = functional.linear(twice, weight).view(9, 5, 40).transpose(0, 1) + 1
        return functional.linear(thrice, weight), functional.linear(turned, weight), functional.linear(residual, kept)

    inputs = [torch.randint(-2, 3, (45, 40)).float(), torch.eye(40)[torch.randperm(40)]]
    planned = Planned(kernels, layers, inputs)
    for count in (1, 2):
        with threads(count):
            assert all(torch.equal(*pair) for pair in zip(planned(*inputs), layers(*inputs), strict=True))
    offsets = [each.offset for each in planned.plan.buffers]
    shared = [
        sum(
            offsets[written] in {offsets[read] for read in list_replaceable(step, written)}
            for written in buffers_of(step)
        )
        for step in planned.plan.steps
        if any(list_replaceable(step, written) for written in buffers_of(step))
    ]
    assert shared == [1, 1]  # of two results one, in the place of the only operand that is not needed again
