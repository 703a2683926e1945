# SPDX-License-Identifier: Apache-2.0
"""Functions of `x [1, tokens, WIDTH]`, which ranks add up, and of weights `[WIDTH]` and twice `[WIDTH, WIDTH]`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from optimum_neuron.targets.neuron.operators.collectives import all_reduce


RANKS, TOKENS, WIDTH = 2, 8, 16
Function = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def summed(x: Tensor) -> Tensor:
    return all_reduce(x, RANKS)


def normed(x: Tensor, scale: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) * (1 / WIDTH) + 1e-6) * scale


def block(x: Tensor, scale: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Two sums on a residual stream, two layers that read the first norm, and a head."""
    stream = summed(x)
    norm = normed(stream, scale)
    stream = stream + summed(torch.relu(norm @ one) * (norm @ other))
    return normed(stream, scale) @ one


def needed_whole_within(x: Tensor, scale: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Two layers read some of all tokens, and what follows of it is split."""
    first = torch.relu(summed(x)) * scale
    second = torch.tanh(first)
    return (second + summed(first @ one) + summed(second @ other)) @ one


def joined_twice(x: Tensor, scale: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """What follows from two sums meets one of them again."""
    first, second = torch.relu(summed(x)), torch.relu(summed(x @ other))
    return (torch.tanh(second) * (first + second)) @ one


def summed_again_and_added(x: Tensor, scale: Tensor, one: Tensor, other: Tensor) -> Tensor:
    stream = torch.relu(summed(x))
    return normed(stream + summed(torch.tanh(stream)), scale) @ one


def each_with_each(x: Tensor, scale: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """A token meets all others: tokens are in two dimensions."""
    stream = torch.relu(summed(x[0]))
    return (stream[:, None] * stream[None]).sum(-1)


def largest_of_each(x: Tensor, scale: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """A reduction with two results."""
    values, places = torch.relu(summed(x)).max(-1)
    return values * places


# Whatever is computed of a sum is computed of each token alone.
TOKEN_BY_TOKEN: dict[str, Function] = {
    # The dimension of the tokens comes to lie in front, and behind others; or there are as many as rows before them.
    "reduced before": lambda x, scale, one, other: (
        normed(torch.relu(summed(x.view(2, TOKENS // 2, WIDTH))).sum(0), scale) @ one
    ),
    "repeated": lambda x, scale, one, other: (torch.tanh(summed(x))[0][None].expand(3, -1, -1) * scale).sum(0),
    "cut behind": lambda x, *_: torch.tanh(torch.relu(summed(x.view(4, 4, 8))).view(4, 4, 2, 4)) * 2.0,
    # What meets the sums is the same for all tokens, and has a place for each.
    "constants": lambda x, scale, one, other: normed(summed(x) + torch.full((TOKENS, 1), 0.5) * scale, scale) @ one,
    "constants in two dimensions": lambda x, scale, one, other: (
        normed(summed(x) + (torch.full((TOKENS, WIDTH), 0.5) * scale)[None], scale) @ one
    ),
    "joined twice": joined_twice,
    "summed again": lambda x, scale, one, other: normed(summed(normed(summed(x), scale)), scale) @ one,
    "summed again and added": summed_again_and_added,
    "scaled by one of all": lambda x, scale, one, other: normed(summed(x) * summed(x @ other).amax(), scale) @ one,
    "in two dimensions": lambda x, scale, one, other: normed(summed(x[0]), scale) @ one,
    "each with each": each_with_each,
    "largest of each": largest_of_each,
    "clamped": lambda x, scale, one, other: normed(summed(x).clamp(-1.5, 0.5).clamp(min=-scale.amax()), scale) @ one,
}


def meeting(make: Callable[[Tensor], Tensor]) -> Function:
    return lambda x, scale, one, other: normed(summed(x) + make(x), scale) @ one


# A product takes sums whole, a reduction is over tokens, or what meets the sums is another one for each token.
WHOLE_SUMS: tuple[Function, ...] = (
    lambda x, scale, one, other: summed(x) @ one,
    lambda x, scale, one, other: summed(x).sum(1) * scale,
    *map(
        meeting,
        (
            lambda x: x,
            lambda x: x.sum(-1, keepdim=True),
            torch.tanh,
            lambda x: torch.tanh(x.flatten()).view(x.shape),
            lambda x: torch.tanh(x[0])[None],
        ),
    ),
)
