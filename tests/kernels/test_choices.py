# SPDX-License-Identifier: Apache-2.0
"""Elements of rows by number, as routers of experts choose them: torch's numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernel_calls import Kernels, Planned, all_same, int32, same_bits, threads
from torch import Tensor, nn

from optimum_neuron.kernels.lower.lower import UnknownOperationError
from optimum_neuron.kernels.steps.steps import Gather, Scatter, TopK


@pytest.mark.parametrize("shape, k", [((5, 7), 1), ((5, 7), 7), ((1, 9, 130), 8), ((3, 2, 4), 2), ((900, 64), 6)])
def test_the_largest_come_in_order_of_equal_ones_the_first_and_nan_before_all(
    kernels: Kernels, shape: tuple[int, ...], k: int
) -> None:
    x = torch.randn(shape).mul(2).round()  # many are equal
    x.view(-1)[::11] = torch.nan
    x.view(-1)[3::17] = torch.inf

    def largest(x: Tensor) -> tuple[Tensor, Tensor]:
        values, columns = torch.topk(x, k, dim=-1) if k > 1 else torch.max(x, -1, keepdim=True)
        return values, (columns + 1).to(torch.int32)

    planned = Planned(kernels, largest, [x])
    assert any(isinstance(step, TopK) for step in planned.plan.steps)
    values, columns = (each[..., :k] for each in x.sort(stable=True, dim=-1, descending=True))
    for count in (1, 3):
        with threads(count):
            found = planned(x)
        assert same_bits(found[0], values) and same_bits(found[1].long(), columns + 1)


def grouped_router(logits: Tensor, bias: Tensor, actual: Tensor) -> tuple[Tensor, Tensor]:
    """As of DeepSeek-V3: groups by their two best experts, then experts of the best groups."""
    scores = logits.sigmoid()
    biased = scores + bias
    groups = biased.view(-1, 4, 4).topk(2, dim=-1)[0].sum(-1)
    mask = torch.zeros_like(groups)
    mask.scatter_(1, groups.topk(2, dim=-1, sorted=False)[1], 1)
    wide = mask.unsqueeze(-1).expand(-1, 4, 4).reshape(-1, 16)
    index = biased.masked_fill(~wide.bool(), 0.0).topk(3, dim=-1, sorted=False)[1]
    weights = scores.gather(1, index)
    weights /= weights.sum(-1, keepdim=True) + 1e-20
    return torch.where(actual[:, None], index, 16).to(torch.int32), weights * 2.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_router_of_groups_and_experts_calls_kernels_alone_and_no_dead_token(
    kernels: Kernels, dtype: torch.dtype
) -> None:
    inputs = [torch.randn(9, 16).to(dtype).float(), torch.randn(16), torch.rand(9) > 0.3]
    planned = Planned(kernels, grouped_router, inputs, tokens=9)
    assert {TopK, Gather, Scatter} <= {type(step) for step in planned.plan.steps}
    assert all(step.tokens is not None for step in planned.plan.steps if isinstance(step, TopK | Gather | Scatter))
    expected = grouped_router(*inputs)
    found = planned(*inputs)
    order = [each.argsort(-1) for each in (expected[0], found[0])]
    for own, their, tolerance in ((0, 0, 0), (1, 1, 1e-6)):
        theirs = expected[own].gather(1, order[0])[inputs[2]]
        torch.testing.assert_close(found[their].gather(1, order[1])[inputs[2]], theirs, rtol=tolerance, atol=tolerance)
    assert all_same([each[:4] for each in planned(*inputs, live=4)], [each[:4] for each in found])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool], ids=str)
def test_elements_are_taken_and_marked_by_their_numbers_and_by_no_wrong_one(
    kernels: Kernels, dtype: torch.dtype
) -> None:
    source, index = (torch.randn(3, 5) * 3).to(dtype), int32([[4, 0], [2, 2], [1, 3]])

    def chosen(source: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        taken = source.gather(-1, index.long())
        return taken, source.scatter(1, index.long(), 1), source.scatter(1, index.long(), taken)

    planned = Planned(kernels, chosen, [source, index])
    assert all_same(planned(source, index), chosen(source, index))
    for wrong in (-1, 5, 2**31 - 1):
        with pytest.raises(IndexError):
            planned(source, int32([[4, 0], [2, wrong], [1, 3]]))


def _writes_to_itself(x: Tensor, index: Tensor) -> tuple[Tensor, ...]:
    y = x * 2
    y.mul_(3).add_(x)
    return y, y - 1


def _writes_under_a_view(x: Tensor, index: Tensor) -> tuple[Tensor, ...]:
    y = x * 2
    first = y[0]
    y.mul_(3)
    return y, first


def _writes_through_a_view(x: Tensor, index: Tensor) -> tuple[Tensor, ...]:
    y = x * 2
    before = y + 0
    y[:, 1].add_(1)
    y.clamp_(max=1.5)
    return y, before


def _multiplies_whole_numbers(x: Tensor, index: Tensor) -> tuple[Tensor, ...]:
    long = index.long()
    return (long * long).float(), (long + 1).to(torch.int32)


def _keeps_whole_numbers_in_bounds(x: Tensor, index: Tensor) -> tuple[Tensor, ...]:
    best = x.topk(2)[1]
    looked_up = best[index.clamp(0, 2)].to(torch.int32)
    return (best * 3 + 1 - best).to(torch.int32), torch.cat([best, best[:, :1]], 1) < 2, looked_up


def _divides_whole_numbers(x: Tensor, index: Tensor) -> tuple[Tensor, ...]:
    down = torch.div(index, 5, rounding_mode="floor")
    return down, index // 2**30, index % 7, torch.remainder(x.topk(2)[1] * 5 - 3, 4).to(torch.int32)


@pytest.mark.parametrize(
    "function",
    [_writes_to_itself, _writes_under_a_view, _writes_through_a_view, _keeps_whole_numbers_in_bounds, _divides_whole_numbers],
)  # fmt: skip
def test_writes_and_whole_numbers_are_those_of_torch(
    best_kernels: Kernels, function: Callable[..., tuple[Tensor, ...]]
) -> None:
    inputs = [torch.arange(12.0).view(3, 4).sin(), int32([2**31 - 1, -(2**31), 7])]
    assert all_same(Planned(best_kernels, function, inputs)(*inputs), function(*inputs))


@pytest.mark.parametrize("function, words", [
    (_multiplies_whole_numbers, r"it calls aten\.to\.dtype of int32, which no kernel .* computes; export with"),
    (lambda x, index: (x.cumprod(-1),), r"it calls aten\.cumprod\.default of float32, which"),
    (lambda x, index: (index // -2,), r"it calls aten\.floor_divide\.default of int32, which"),
])  # fmt: skip
def test_what_no_kernel_computes_is_refused(
    best_kernels: Kernels, function: Callable[..., tuple[Tensor, ...]], words: str
) -> None:
    with pytest.raises(UnknownOperationError, match=words):
        Planned(best_kernels, function, [torch.ones(3, 4), int32([2, 3])])


class _Routed(nn.Module):
    """Experts of each token by a table, as of DeepSeek-V4."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randint(0, 5, (9, 2)))

    def forward(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        index = self.table[tokens].long()
        return x.gather(1, index), torch.where(tokens[:, None] > 3, index, 5).to(torch.int32)


def test_experts_are_looked_up_in_a_table(best_kernels: Kernels) -> None:
    inputs, module = [torch.randn(4, 5), int32([8, 0, 3, 7])], _Routed()
    assert all_same(Planned(best_kernels, module, inputs)(*inputs), module(*inputs))


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4).bfloat16())

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (x * (1 + self.weight.float()).t().contiguous() + self.weight.neg().t(),)


def test_what_weights_alone_give_is_computed_once_by_kernels(best_kernels: Kernels) -> None:
    module, x = _Scaled(), torch.randn(4, 6)
    planned = Planned(best_kernels, module, [x])
    assert {type(each).__name__ for each in planned.plan.once} == {"Map"}
    with torch.no_grad():
        expected = module(x)
    assert all(all_same(planned(x), expected) for _ in range(2))
