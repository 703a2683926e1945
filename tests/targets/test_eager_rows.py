# SPDX-License-Identifier: Apache-2.0
"""On the eager target a row is computed alike wherever it stands among others, and as torch computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from optimum_neuron.targets.eager import _EqualRows


ROWS = (1, 5, 8, 20, 25, 32, 100, 200)
KEYS, VALUES, WEIGHT = (torch.randn(*sizes) for sizes in ((1, 2, 64, 24), (1, 2, 64, 12), (24, 40)))
FEW = torch.randn(2, 96)
COMPUTE: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: linear(x, WEIGHT.t()),
    "two outputs": lambda x: linear(x.repeat(1, 1, 1, 4), FEW),
    "matmul": lambda x: x @ WEIGHT,
    "batches": lambda x: torch.matmul(x, KEYS.transpose(2, 3)),
    "attention": lambda x: scaled_dot_product_attention(x, KEYS, VALUES, attn_mask=torch.zeros(x.shape[-2], 64)),
}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", COMPUTE)
def test_a_row_does_not_depend_on_its_place(name: str, rows: int) -> None:
    x = torch.randn(1, 2, rows, 24)
    with _EqualRows():
        expected = COMPUTE[name](x)
        for place in {0, 1, rows // 2, rows - 2, rows - 1} & set(range(rows)):
            other = torch.zeros_like(x)
            other[..., place, :] = x[..., 0, :]
            assert torch.equal(COMPUTE[name](other)[..., place, :], expected[..., 0, :])
    torch.testing.assert_close(expected, COMPUTE[name](x))


@pytest.mark.parametrize(
    ("args", "options"),
    [
        ((), {}),
        ((), {"is_causal": True}),
        ((None, 0.0, True), {"scale": 0.5}),
        ((torch.ones(1, 1, 1, 64, dtype=torch.bool),), {}),
        ((), {"attn_mask": torch.ones(9, 64, dtype=torch.bool).tril(5)}),
    ],
)
def test_attention_that_a_models_own_code_calls_is_torchs(args: tuple[Any, ...], options: dict[str, Any]) -> None:
    query = torch.randn(1, 2, 9, 24)
    expected = scaled_dot_product_attention(query, KEYS, VALUES, *args, **options)
    with _EqualRows():
        found = scaled_dot_product_attention(query, KEYS, VALUES, *args, **options)
    torch.testing.assert_close(found, expected)
