# SPDX-License-Identifier: Apache-2.0
"""Positions encoded by rotations, in a plan: torch's bits, in one Map, for as many tokens as there are; and what only looks like one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernel_calls import Kernels, Planned, same_bits
from torch import Tensor

from optimum_neuron.kernels.steps.steps import Map


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
    computed, *copied = planned.plan.steps  # into the order of the output
    assert (
        isinstance(computed, Map) and computed.tokens is not None and all(each.tokens is not None for each in copied)
    )
    assert {item.op for item in computed.items} == {"load", "mul", "rotate_half", "add", "store"}
    whole = planned(x, cos, sin)[0]
    assert same_bits(whole, rotated(x, cos, sin))
    assert same_bits(planned(x, cos, sin, live=2)[0][:2], whole[:2])


def test_numbers_of_all_kinds_are_rotated_as_they_are(kernels: Kernels) -> None:
    x = torch.tensor([[0.0, -0.0, torch.inf, -torch.inf, 1e-45, -1e-45, 3e38, torch.nan]])
    planned = Planned(kernels, rotate_half, [x])
    assert "rotate_half" in planned.operators
    assert same_bits(planned(x)[0], rotate_half(x))


def test_what_was_normalized_is_rotated_in_the_same_map(kernels: Kernels) -> None:
    def function(x: Tensor) -> Tensor:
        return rotate_half(x / x.square().mean(-1, keepdim=True).sqrt()) * 2

    x = torch.randn(7, 8)
    planned = Planned(kernels, function, [x])
    assert len(planned.plan.steps) == 1
    torch.testing.assert_close(planned(x)[0], function(x))


LOOKS_LIKE_ONE: dict[str, Callable[[Tensor], Tensor]] = {
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
}


@pytest.mark.parametrize("function", LOOKS_LIKE_ONE.values(), ids=LOOKS_LIKE_ONE)
def test_what_looks_like_a_rotation_is_computed_as_it_is(
    best_kernels: Kernels, function: Callable[[Tensor], Tensor]
) -> None:
    x = torch.randn(6, 8)
    planned = Planned(best_kernels, function, [x])
    assert same_bits(planned(x)[0], function(x))
