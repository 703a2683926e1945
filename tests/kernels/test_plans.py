# SPDX-License-Identifier: Apache-2.0
"""Plans of what graphs do with memory, of rotations, and of products per head: the bits of torch, with any number of threads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernel_calls import Kernels, Planned, all_same, same_bits, threads
from torch import Tensor, nn
from torch.nn import functional

from optimum_neuron.kernels.lower.arena import buffers_of, list_replaceable
from optimum_neuron.kernels.steps.steps import Linears, Map


def test_large_maps_give_the_same_bits_with_any_number_of_threads(kernels: Kernels) -> None:
    def layer(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        scaled = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
        normed = weight * scaled.to(x.dtype)
        gated = functional.silu(normed) * y
        return gated, gated.softmax(-1), (gated + x).sum((0, 1)), gated.transpose(0, 1).amax(-1)

    inputs = [torch.randn(3, 250, 130).bfloat16(), torch.randn(250, 130).bfloat16(), torch.randn(130).bfloat16()]
    planned = Planned(kernels, layer, inputs)
    results = []
    for count in (1, 2, 3):
        with threads(count):
            results.append([each.clone() for each in planned(*inputs)])
    assert all(all_same(result, results[0]) for result in results)
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
        chosen[2:5].copy_(x[2:5])
        ones[1:].mul_(x.sum())
        return chosen == 0, ones

    planned = Planned(best_kernels, function, [torch.zeros(7)])
    for step in range(3):
        x = torch.randn(7) + step
        assert all(torch.equal(a, b) or torch.allclose(a, b) for a, b in zip(planned(x), function(x), strict=True))


def _turn(x: Tensor) -> Tensor:
    """As models of complex numbers rotate pairs."""
    turns = torch.polar(torch.ones(4, 1, 3), x[:, :, :3]) * 0.5
    turned = torch.view_as_complex(x.reshape(4, 5, 3, 2)) * turns.unsqueeze(1)[:, 0].expand(4, 5, 3)
    return torch.view_as_real(turned.to(torch.complex64) * 2.0).flatten(2)


SPELLED: dict[str, Callable[[Tensor], Tensor]] = {
    "deviation": lambda x: x.std(-1, keepdim=True),
    "deviation of all": lambda x: x.std((0, 2), unbiased=False),
    "padding": lambda x: functional.pad(x, (1, 2, 0, 3), value=-1.5) * 2,
    "padding of whole numbers": lambda x: functional.pad((x * 9).int(), (0, 0, 1, 0), value=-1.0) + 1,
    "softmax of a first dimension": lambda x: x.softmax(1),
    "complex numbers": _turn,
    "one of two types": lambda x: torch.cat([x, (x > 0).bfloat16()], -1),
    "product with a bias": lambda x: torch.baddbmm(x[:, :, :5], x, x.mT, beta=0.5, alpha=0.25),
    "product with zeros": lambda x: torch.baddbmm(torch.zeros(4, 5, 5), x, x.mT),
}


@pytest.mark.parametrize("name", SPELLED)
def test_what_has_no_kernel_is_written_as_what_has_one(best_kernels: Kernels, name: str) -> None:
    x = torch.randn(4, 5, 6)
    found, expected = Planned(best_kernels, lambda x: (SPELLED[name](x),), [x])(x)[0], SPELLED[name](x)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_equal_constants_are_stored_once(best_kernels: Kernels) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        first, second = (torch.ones(5, 5).tril() for _ in range(2))
        zero, minus = torch.tensor([0.0] * 5), torch.tensor([-0.0] * 5)
        return x @ first, x @ second, x * zero, x * minus

    x = torch.randn(5, 5)
    planned = Planned(best_kernels, function, [x])
    assert sorted(each.bytes for each in planned.plan.buffers if each.kind == "constant") == [20, 20, 100]
    assert all(map(torch.allclose, planned(x), function(x)))  # products are added up in another order than torch does


def test_a_result_takes_the_place_of_what_nobody_else_reads(kernels: Kernels) -> None:
    def layers(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        kept = x @ weight.t()
        residual = kept + kept @ weight.t()
        normed = residual * residual.square().sum(-1, keepdim=True)
        added = normed @ weight.t()
        twice, thrice = added * 2, added * 3
        turned = (twice @ weight.t()).view(9, 5, 40).transpose(0, 1) + 1
        return thrice @ weight.t(), turned @ weight.t(), residual @ kept.t()

    inputs = [torch.randint(-2, 3, (45, 40)).float(), torch.eye(40)[torch.randperm(40)]]
    planned = Planned(kernels, layers, inputs)
    for count in (1, 2):
        with threads(count):
            assert all(torch.equal(*pair) for pair in zip(planned(*inputs), layers(*inputs), strict=True))
    offsets = [each.offset for each in planned.plan.buffers]
    shared = []
    for step in planned.plan.steps:
        places = {written: {offsets[read] for read in list_replaceable(step, written)} for written in buffers_of(step)}
        shared.append(sum(offsets[written] in read for written, read in places.items()))
    # Of two results one, in the place of the only operand that is not needed again.
    assert sorted(shared)[-3:] == [0, 1, 1]


# Positions encoded by rotations: torch's bits, in one Map, for as many tokens as there are

TOKENS, HEADS = 5, 3


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], dim=-1)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As transformers does: `x [1, tokens, heads * columns]`, to heads before tokens."""
    heads = x.view(1, x.shape[1], HEADS, -1).transpose(1, 2)
    return (heads * cos + rotate_half(heads) * sin).transpose(1, 2).reshape(x.shape[1], -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [2, 6, 64, 4100])
def test_a_rotation_is_one_map_with_the_bits_of_its_parts(kernels: Kernels, columns: int, dtype: torch.dtype) -> None:
    x = torch.randn(1, TOKENS, HEADS * columns).to(dtype)
    cos, sin = torch.randn(2, TOKENS, columns)
    planned = Planned(kernels, rotated, [x, cos, sin], tokens=TOKENS)
    computed = planned.plan.steps[0]  # others copy into the order of the output
    assert isinstance(computed, Map) and all(each.tokens is not None for each in planned.plan.steps)
    assert {item.op for item in computed.items} == {"load", "mul", "rotate_half", "add", "store"}
    whole = planned(x, cos, sin)[0]
    assert same_bits(whole, rotated(x, cos, sin))
    assert same_bits(planned(x, cos, sin, live=2)[0][:2], whole[:2])


def test_numbers_of_all_kinds_are_rotated_in_the_map_that_makes_them(kernels: Kernels) -> None:
    def function(x: Tensor) -> Tensor:
        return rotate_half(x / x.square().mean(-1, keepdim=True).sqrt()) * 2

    x, special = torch.randn(7, 8), torch.tensor([[0.0, -0.0, torch.inf, -torch.inf, 1e-45, -1e-45, 3e38, torch.nan]])
    planned = Planned(kernels, function, [x])
    assert len(planned.plan.steps) == 1
    torch.testing.assert_close(planned(x)[0], function(x))
    planned = Planned(kernels, rotate_half, [special])
    assert "rotate_half" in planned.operators and same_bits(planned(special)[0], rotate_half(special))


def _changed_copy(x: Tensor, copy: Callable[[Tensor], Tensor]) -> Tensor:
    kept = x.t() * 2  # which torch keeps transposed
    return copy(kept).mul_(3).view(8, 6) - kept


def _without_elements(x: Tensor) -> Tensor:
    mixed = x * 2
    mixed[..., 4:4] = (x + 1)[..., 4:4]
    return mixed * 3


LOOKS_SIMPLER: dict[str, Callable[[Tensor], Tensor]] = {
    "of an odd number of columns": lambda x: torch.cat([-x[..., 3:7], x[..., :3]], -1),
    "with halves of other lengths": lambda x: torch.cat([-x[..., 3:], x[..., :3]], -1),
    "with the other half negated": lambda x: torch.cat([x[..., 4:], -x[..., :4]], -1),
    "of halves that stay": lambda x: torch.cat([-x[..., :4], x[..., 4:]], -1),
    "of two tensors": lambda x: torch.cat([-(x * 2)[..., 4:], x[..., :4]], -1),
    "of the first columns": lambda x: torch.cat([-x[..., 2:4], x[..., :2]], -1),
    "of every other column": lambda x: torch.cat([-x[..., 4::2], x[..., :4:2]], -1),
    "of rows": lambda x: torch.cat([-x[3:], x[:3]], 0),
    "of integers": lambda x: rotate_half(x.int()),
    "into three": lambda x: torch.cat([-x[..., 4:], x[..., :4], x], -1),
    "a copy by reshape": lambda x: _changed_copy(x, lambda y: y.reshape(-1)),
    "a copy in order": lambda x: _changed_copy(x, lambda y: y.contiguous()),
    "no elements": _without_elements,
}


@pytest.mark.parametrize("function", LOOKS_SIMPLER.values(), ids=LOOKS_SIMPLER)
def test_what_looks_like_a_rotation_or_a_view_is_computed_as_it_is(
    best_kernels: Kernels, function: Callable[[Tensor], Tensor]
) -> None:
    x = torch.randn(6, 8)
    planned = Planned(best_kernels, function, [x])
    assert same_bits(planned(x)[0], function(x))


# Products of tokens and a parameter per head: linear layers, whose bits do not depend on how many tokens there are

INPUTS, OUTPUTS = 40, 24


class Gates(nn.Module):
    """Two products of the same tokens `[tokens, heads * inputs]`, and one of what is no parameter."""

    def __init__(self, *, scaled: bool) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(HEADS, INPUTS, OUTPUTS) for _ in range(2))
        self.biases = nn.ParameterList(torch.randn(HEADS, OUTPUTS) for _ in range(2))
        self.scaled = scaled

    def forward(self, x: Tensor) -> list[Tensor]:
        by_head = x.reshape(len(x), HEADS, INPUTS).permute(1, 0, 2)
        pairs = zip(self.weights, self.biases, strict=True)
        if self.scaled:
            found = [torch.baddbmm(bias[:, None], by_head, weight * x.amax(), alpha=2) for weight, bias in pairs]
        else:
            found = [torch.baddbmm(bias[:, None, :], by_head, weight) for weight, bias in pairs]
        return [torch.sigmoid(each.transpose(0, 1).reshape(len(x), HEADS * OUTPUTS)) for each in found]


def test_a_token_gets_the_same_bits_alone_and_among_others(kernels: Kernels) -> None:
    x, gates = torch.randn(11, HEADS * INPUTS), Gates(scaled=False)
    planned, alone = Planned(kernels, gates, [x], tokens=11), Planned(kernels, gates, [x[:1]])
    linears = [step for step in planned.plan.steps if isinstance(step, Linears)]
    assert [len(step.layers) for step in linears] == [2] * HEADS
    for found, exact in zip(planned(x), gates(x), strict=True):
        torch.testing.assert_close(found, exact, atol=1e-6, rtol=1e-5)
    whole, part = planned(x), planned(x, live=4)
    assert all(same_bits(a[:4], b[:4]) for a, b in zip(whole, part, strict=True))
    for i in (0, 7, 10):
        assert all(same_bits(a[i], b[0]) for a, b in zip(whole, alone(x[i : i + 1]), strict=True))


@pytest.mark.parametrize("count", [1, 5])
def test_other_products_are_those_of_torch(best_kernels: Kernels, count: int) -> None:
    x, gates = torch.randn(count, HEADS * INPUTS), Gates(scaled=True)
    for found, exact in zip(Planned(best_kernels, gates, [x])(x), gates(x), strict=True):
        torch.testing.assert_close(found, exact, atol=1e-6, rtol=1e-5)
