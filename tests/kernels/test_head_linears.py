# SPDX-License-Identifier: Apache-2.0
"""Products of tokens and a parameter per head in a plan: linear layers, whose bits do not depend on how many tokens there are."""

from __future__ import annotations

import pytest
import torch
from kernel_calls import Kernels, Planned, same_bits
from torch import Tensor, nn

from optimum_neuron.kernels.steps.steps import Linears


HEADS, INPUTS, OUTPUTS = 3, 40, 24


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
    assert planned.calls_torch == []
    linears = [step for step in planned.plan.steps if isinstance(step, Linears)]
    assert [len(step.layers) for step in linears] == [2] * HEADS
    for found, exact in zip(planned(x), gates(x), strict=True):
        torch.testing.assert_close(found, exact, atol=1e-6, rtol=1e-5)
    whole, part = planned(x), planned(x, live=4)
    assert all(same_bits(a[:4], b[:4]) for a, b in zip(whole, part, strict=True))
    for i in (0, 7, 10):
        assert all(same_bits(a[i], b[0]) for a, b in zip(whole, alone(x[i : i + 1]), strict=True))


@pytest.mark.parametrize("count", [1, 5])
def test_other_products_are_left_to_torch(best_kernels: Kernels, count: int) -> None:
    x, gates = torch.randn(count, HEADS * INPUTS), Gates(scaled=True)
    planned = Planned(best_kernels, gates, [x])
    assert planned.calls_torch.count("aten.baddbmm.default") == 2
    for found, exact in zip(planned(x), gates(x), strict=True):
        torch.testing.assert_close(found, exact, atol=1e-6, rtol=1e-5)
