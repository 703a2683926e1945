# SPDX-License-Identifier: Apache-2.0
"""Functions of `x [1, tokens, WIDTH]`, which ranks add up, and of weights `[WIDTH]` and twice `[WIDTH, WIDTH]`."""

from __future__ import annotations

import torch
from torch import Tensor

from optimum_neuron.targets.neuron.operators.collectives import all_reduce


RANKS, TOKENS, WIDTH = 2, 8, 16


def normed(x: Tensor, scale: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) * (1 / WIDTH) + 1e-6) * scale


def block(x: Tensor, scale: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Two sums on a residual stream, two layers that read the first norm, and a head."""
    stream = all_reduce(x, RANKS)
    norm = normed(stream, scale)
    stream = stream + all_reduce(torch.relu(norm @ one) * (norm @ other), RANKS)
    return normed(stream, scale) @ one


def needed_whole_within(x: Tensor, scale: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """What two layers read of all tokens, and what follows of it where tokens are split."""
    first = torch.relu(all_reduce(x, RANKS)) * scale
    second = torch.tanh(first)
    return (second + all_reduce(first @ one, RANKS) + all_reduce(second @ other, RANKS)) @ one


def reduced_before(x: Tensor, scale: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """The dimension of the tokens comes to lie in front."""
    stream = torch.relu(all_reduce(x.view(2, TOKENS // 2, WIDTH), RANKS))
    return normed(stream.sum(0), scale) @ one


def repeated(x: Tensor, scale: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """And behind others."""
    stream = torch.tanh(all_reduce(x, RANKS))[0]
    return (stream[None].expand(3, -1, -1) * scale).sum(0)


def cut_behind(x: Tensor, scale: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """As many tokens as there are rows before them."""
    stream = torch.relu(all_reduce(x.view(4, 4, 8), RANKS))
    return torch.tanh(stream.view(4, 4, 2, 4)) * 2.0


def with_constants(x: Tensor, scale: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """What meets the sums is the same for all tokens, and has a place for each."""
    return normed(all_reduce(x, RANKS) + torch.full((TOKENS, 1), 0.5) * scale, scale) @ one


def with_constants_in_two_dimensions(x: Tensor, scale: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Whose tokens come to lie behind another dimension."""
    return normed(all_reduce(x, RANKS) + (torch.full((TOKENS, WIDTH), 0.5) * scale)[None], scale) @ one


def joined_twice(x: Tensor, scale: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """What follows from two sums meets one of them again."""
    first, second = torch.relu(all_reduce(x, RANKS)), torch.relu(all_reduce(x @ other, RANKS))
    both = first + second
    return (torch.tanh(second) * both) @ one


def summed_again(x: Tensor, scale: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """A sum takes what follows from another one."""
    return normed(all_reduce(normed(all_reduce(x, RANKS), scale), RANKS), scale) @ one


def summed_again_and_added(x: Tensor, scale: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """And meets it."""
    stream = torch.relu(all_reduce(x, RANKS))
    return normed(stream + all_reduce(torch.tanh(stream), RANKS), scale) @ one


def scaled_by_one_of_all(x: Tensor, scale: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """A number that follows from the sums of all tokens."""
    return normed(all_reduce(x, RANKS) * all_reduce(x @ other, RANKS).amax(), scale) @ one


def in_two_dimensions(x: Tensor, scale: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """The tokens are the first dimension of the sum."""
    return normed(all_reduce(x[0], RANKS), scale) @ one


def each_with_each(x: Tensor, scale: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """A token meets all others: tokens are in two dimensions."""
    stream = torch.relu(all_reduce(x[0], RANKS))
    return (stream[:, None] * stream[None]).sum(-1)


def largest_of_each(x: Tensor, scale: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """A reduction with two results."""
    values, places = torch.relu(all_reduce(x, RANKS)).max(-1)
    return values * places


def clamped(x: Tensor, scale: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Between numbers that are the same for all tokens, and of another shape."""
    return normed(all_reduce(x, RANKS).clamp(-1.5, 0.5).clamp(min=-scale.amax()), scale) @ one


# Whatever is computed of a sum is computed of each token alone.
TOKEN_BY_TOKEN = (
    reduced_before,
    repeated,
    cut_behind,
    with_constants,
    with_constants_in_two_dimensions,
    joined_twice,
    summed_again,
    summed_again_and_added,
    scaled_by_one_of_all,
    in_two_dimensions,
    each_with_each,
    largest_of_each,
    clamped,
)


def used_whole(x: Tensor, scale: Tensor, one: Tensor, other: Tensor) -> Tensor:
    return all_reduce(x, RANKS) @ one


def reduced_over_tokens(x: Tensor, scale: Tensor, one: Tensor, other: Tensor) -> Tensor:
    return all_reduce(x, RANKS).sum(1) * scale


def other_tokens(x: Tensor, scale: Tensor, one: Tensor, other: Tensor) -> Tensor:
    return normed(all_reduce(x, RANKS) + x, scale) @ one


def number_of_each_token(x: Tensor, scale: Tensor, one: Tensor, other: Tensor) -> Tensor:
    return normed(all_reduce(x, RANKS) + x.sum(-1, keepdim=True), scale) @ one


def computed_of_each_token(x: Tensor, scale: Tensor, one: Tensor, other: Tensor) -> Tensor:
    return normed(all_reduce(x, RANKS) + torch.tanh(x), scale) @ one


def tokens_in_one_dimension(x: Tensor, scale: Tensor, one: Tensor, other: Tensor) -> Tensor:
    return normed(all_reduce(x, RANKS) + torch.tanh(x.flatten()).view(x.shape), scale) @ one


def reshaped_of_each_token(x: Tensor, scale: Tensor, one: Tensor, other: Tensor) -> Tensor:
    return normed(all_reduce(x, RANKS) + torch.tanh(x[0])[None], scale) @ one


# What meets the sums is another one for each token.
WITH_ANOTHER_OF_EACH = (
    other_tokens,
    number_of_each_token,
    computed_of_each_token,
    tokens_in_one_dimension,
    reshaped_of_each_token,
)
