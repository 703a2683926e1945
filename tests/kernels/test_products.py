# SPDX-License-Identifier: Apache-2.0
"""Products that models write out: of steps' tensors by a kernel of their own, and of weights in any order as linear layers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernel_calls import Kernels, Planned, all_same, random, threads, with_dtypes
from torch import Tensor, nn

from optimum_neuron.kernels.steps.steps import Linears, MatMul


# Of the largest result.
ERROR = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}


@with_dtypes
@pytest.mark.parametrize(
    "shapes", [((2, 3, 7, 20), (2, 3, 20, 33)), ((1, 4, 1, 64), (4, 64, 192)), ((5, 2), (2, 1))], ids=str
)
def test_products_of_two_tensors_are_those_of_torch_with_any_number_of_threads_and_rows(
    kernels: Kernels, dtype: torch.dtype, shapes: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    left, right = (random(*shape, dtype=dtype) for shape in shapes)

    def multiply(left: Tensor, right: Tensor) -> Tensor:
        return (left * 2) @ (right.transpose(-1, -2) * 0.5).transpose(-1, -2)

    planned = Planned(kernels, multiply, [left, right])
    assert any(isinstance(step, MatMul) for step in planned.plan.steps)
    (found,), expected = planned(left, right), left.double() @ right.double()
    assert (found - expected).abs().max() <= ERROR[dtype] * expected.abs().max()
    with threads(3):
        assert all_same(planned(left, right), [found])
    (alone,) = Planned(kernels, multiply, [left[..., :1, :], right])(left[..., :1, :], right)
    assert all_same([alone], [found[..., :1, :]])


class _Turned(nn.Module):
    """Weights in the order of GPT-2's, of Falcon's, and in none that a kernel takes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(6, 10)), nn.Parameter(torch.randn(4, 10))
        self.bias = nn.Parameter(torch.randn(10))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.first).relu() @ self.second.T + x.mm(self.first[:, :4])


def test_products_with_weights_in_any_order_are_linear_layers(best_kernels: Kernels) -> None:
    module, x = _Turned(), torch.randn(5, 6)
    planned = Planned(best_kernels, module, [x])
    layers = [layer for step in planned.plan.steps if isinstance(step, Linears) for layer in step.layers]
    assert len(layers) == 3 and planned.plan.once
    torch.testing.assert_close(planned(x)[0], module(x).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.repeat(2, 1, 3) + 1,
        lambda x: torch.clamp(x, min=x.abs() - 1),
        lambda x: nn.functional.rms_norm(x, (4,), eps=1e-5),
        lambda x: nn.functional.scaled_dot_product_attention(
            x, x + 1, x - 1, (x @ x.mT).masked_fill(torch.ones(5, 5).tril() == 0, -torch.inf), scale=0.3
        ),
        lambda x: x * (x[:, :1] > 0).any(1)[:, None],
        lambda x: torch.gather(x, 0, (x[:2] > 0).to(torch.int32).long()),
    ],
    ids=["repeat", "clamp by tensors", "rms_norm", "attention", "any of one", "gather of the first dimension"],
)
def test_what_a_map_or_lookup_can_compute_calls_no_torch(
    best_kernels: Kernels, function: Callable[[Tensor], Tensor]
) -> None:
    x = torch.randn(3, 5, 4)
    planned = Planned(best_kernels, function, [x])
    torch.testing.assert_close(planned(x)[0], function(x), rtol=1e-6, atol=1e-6)
