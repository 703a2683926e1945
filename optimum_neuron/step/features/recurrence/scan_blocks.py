# SPDX-License-Identifier: Apache-2.0
"""The products of a recurrence over blocks of tokens: of all blocks at once but for the states between them, one after another.

A compiler may contract a product and a sum in the code of one block and not in that of another. So the states between blocks are all
that is computed block by block, and in whatever they are made of a selection stands between a product and a sum.

Decays are summed where they are needed, never taken from one another: a sum over many tokens has lost what few of them add.
The delta rule solves a triangular system per block, by inverses of its diagonal blocks of twice the size each time. That is
as exact as substitution; powers of the matrix are not, where a prompt repeats a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from .recurrence import ScanCall


@dataclass(frozen=True)
class BlockMasks:
    """Which tokens of a block are before which, `[block, block]` each: row i, column j.

    Attributes:
        until: whether j is i or before it.
        before: whether j is before i.
        pairs: by doubling width, whether i is in the second of two neighboring parts, and j in the first; each j before i once.
        parts: by the same widths, whether i and j are in the same part.
    """

    until: Tensor
    before: Tensor
    pairs: tuple[Tensor, ...]
    parts: tuple[Tensor, ...]

    @property
    def itself(self) -> Tensor:
        return self.until & ~self.before

    @classmethod
    def of(cls, block: int) -> BlockMasks:
        place = torch.arange(block, dtype=torch.int32)
        row, column = place[:, None], place[None]
        pairs, parts, width = [], [], 1
        while width < block:
            own, other = row & -width, column & -width
            pairs.append((own == other + width) & ((other & width) == 0))
            parts.append(own == other)
            width *= 2
        return cls(row >= column, row > column, tuple(pairs), tuple(parts))


class Blocks(Protocol):
    """All blocks of a step, of which as much is computed as needs no state."""

    def next_state(self, number: int, state: Tensor) -> Tensor:
        """From the state `[1, heads, key_dim, value_dim]` before a block to the one behind it."""

    def outputs(self, states: Tensor) -> Tensor:
        """From the states before all blocks `[blocks, heads, key_dim, value_dim]` to `[blocks, heads, block, value_dim]`."""


@dataclass(frozen=True)
class _Products:
    """What of all blocks can be computed without a state; everything is `[blocks, heads, block, ...]`.

    Attributes:
        scores: `[.., block, block]`, of each token's query and of the keys until it, decayed.
        queries: read the state before the block; keys: add to the one behind it. Both decayed.
        values: what a block adds, but for what the state before it predicts (delta rule).
        predicting: keys that read this, `[.., block, key_dim]`; None without the delta rule.
        decay: `[blocks, heads, 1 or key_dim, 1]`, of the state over a block.
        broken: `[blocks, 1, block, 1]`: NaN from the first token on that is not finite, else 0.
    """

    scores: Tensor
    queries: Tensor
    keys: Tensor
    values: Tensor
    predicting: Tensor | None
    decay: Tensor
    broken: Tensor

    def next_state(self, number: int, state: Tensor) -> Tensor:
        at = slice(number, number + 1)
        added = self.keys[at].transpose(-1, -2) @ self._added_values(at, state)
        return _kept(self.decay[at] * state, self.broken[at, :, -1:]) + added

    def outputs(self, states: Tensor) -> Tensor:
        return self.queries @ states + self.scores @ self._added_values(slice(None), states) + self.broken

    def _added_values(self, at: slice, states: Tensor) -> Tensor:
        return self.values[at] if self.predicting is None else self.values[at] - self.predicting[at] @ states


def _kept(state: Tensor, broken: Tensor) -> Tensor:
    return torch.where(broken == 0, state, broken)


@dataclass(frozen=True)
class _Parts:
    """Inputs of all blocks, `[blocks, heads, block, ...]`; `decay` and `beta` have a last dimension, of 1 where a head has one."""

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    beta: Tensor | None
    broken: Tensor


@dataclass(frozen=True)
class _States:
    """A selective scan, which no product of queries and keys expresses: all states of a block, as if it began with zeros.

    Attributes:
        decays, sums: `[blocks, heads, block, key_dim, value_dim]`: what a state before the block is multiplied by until each token,
            and what the tokens until it add.
        queries: `[blocks, heads, block, key_dim]`.
        broken: as of `_Products`.
    """

    decays: Tensor
    sums: Tensor
    queries: Tensor
    broken: Tensor

    def next_state(self, number: int, state: Tensor) -> Tensor:
        at = slice(number, number + 1)
        return _kept(self.decays[at, :, -1] * state, self.broken[at, :, -1:]) + self.sums[at, :, -1]

    def outputs(self, states: Tensor) -> Tensor:
        behind = self.decays * states[:, :, None] + self.sums + self.broken[..., None]
        return (behind * self.queries[..., None]).sum(-2)


def compute_blocks(call: ScanCall, inputs: Tensor, queries: Tensor, nan: Tensor, masks: BlockMasks) -> Blocks:
    """All that needs no state.

    Args:
        inputs: `[blocks, block, width]`, of each token those of `ScanCall.inputs`.
        queries: `[blocks, block, key_heads, key_dim]`.
        nan: `[blocks, block]`, 0, or NaN for a token that was not finite.
    """
    parts = _parts(call, inputs, queries, nan, masks)
    if call.rates is not None:
        return _states(parts, call.rates)
    scores, products = _scores(parts, masks)
    until, after = _decays(parts, masks)
    values, predicting = parts.value, None
    if parts.beta is not None:
        solve = _inverse(torch.where(masks.before, parts.beta * products, 0.0), masks)
        values, predicting = solve @ (parts.beta * values), solve @ (parts.beta * parts.key * until)
    whole = until[:, :, -1, :, None]
    return _Products(scores, parts.query * until, parts.key * after, values, predicting, whole, parts.broken)


def _states(parts: _Parts, rates: Tensor) -> Blocks:
    """Sums over twice as many tokens each time: log2(block) steps, in each of which a token looks at one before it."""
    decays, block = parts.decay, parts.key.shape[2]
    # By values: a selection by place is none in the code of a block's last token, which a compiler may know.
    kept = parts.broken[..., None] == 0
    sums = torch.where(kept, parts.key[..., None] * parts.value[..., None, :], 0.0)
    width = 1
    while width < block:
        earlier = (decays[..., None, :] * rates).exp() * _shifted(sums, width)
        sums = sums + torch.where(kept, earlier, 0.0)
        decays = decays + _shifted(decays, width)
        width *= 2
    return _States((decays[..., None, :] * rates).exp(), sums, parts.query, parts.broken)


def _shifted(x: Tensor, width: int) -> Tensor:
    """`[blocks, heads, block, ...]` of so many tokens earlier; zeros before the first."""
    return nn.functional.pad(x[:, :, :-width], (0, 0) * (x.dim() - 3) + (width, 0))


def _parts(call: ScanCall, inputs: Tensor, queries: Tensor, nan: Tensor, masks: BlockMasks) -> _Parts:
    shapes = [each.shape[1:] for each in call.inputs()]
    split = torch.split(inputs, [shape.numel() for shape in shapes], dim=-1)
    key, value, decay, *beta = (each.unflatten(-1, shape) for each, shape in zip(split, shapes, strict=True))
    decay = decay if call.decay.dim() == 3 else decay[..., None]
    # A sum of selected tokens: NaN times zero would reach those before.
    broken = torch.where(masks.until, nan[:, None, :], 0.0).sum(-1)
    return _Parts(
        call.over_heads(queries).transpose(1, 2),
        call.over_heads(key).transpose(1, 2),
        value.transpose(1, 2),
        decay.transpose(1, 2),
        beta[0][..., None].transpose(1, 2) if beta else None,
        broken[:, None, :, None],
    )


def _decays(parts: _Parts, masks: BlockMasks) -> tuple[Tensor, Tensor]:
    """What the state before the block is multiplied by until each token, and what a token adds, until the block's end."""
    return _sums(masks.until, parts.decay).exp(), _sums(masks.before.t(), parts.decay).exp()


def _sums(mask: Tensor, x: Tensor) -> Tensor:
    """Of the tokens that a mask `[block, block]` has in each row, of `[blocks, heads, block, n]`.

    A product per block and head: of rows of several in one matrix, a library may sum some otherwise than others.
    """
    return mask.to(x.dtype).expand(*x.shape[:2], *mask.shape) @ x


def _twice(x: Tensor, dim: int) -> Tensor:
    """For queries, and for keys behind them."""
    return torch.cat([x, x], dim)


def _scores(parts: _Parts, masks: BlockMasks) -> tuple[Tensor, Tensor]:
    """Products of queries and of keys with the keys until them, decayed: `[blocks, heads, block, block]` each."""
    both = torch.cat([parts.query, parts.key], 2)
    block = len(masks.until)
    if parts.decay.shape[-1] == 1:
        # Of each pair the decays of the tokens behind j until i, in one product.
        later = torch.where(masks.before, parts.decay, 0.0)
        decays = _sums(masks.until, later).exp()
        products = both @ parts.key.transpose(-1, -2) * _twice(decays, 2)
    else:
        products = _decayed_products(both, parts, masks)
    query, key = (torch.where(masks.until, each, 0.0) for each in products.split(block, 2))
    return query, key


def _decayed_products(both: Tensor, parts: _Parts, masks: BlockMasks) -> Tensor:
    """The same where each row of the state has a decay of its own.

    A pair's decay is that from j to the end of its part, and that from there to i: neither exceeds 1 in any part.
    """
    same = (both * _twice(parts.key, 2)).sum(-1, keepdim=True)
    products = torch.where(_twice(masks.itself, 0), same, 0.0)
    for pair, part in zip(masks.pairs, masks.parts, strict=True):
        until = _sums(part & masks.until, parts.decay).exp()
        after = _sums(part & masks.before.t(), parts.decay).exp()
        found = (both * _twice(until, 2)) @ (parts.key * after).transpose(-1, -2)
        products = torch.where(_twice(pair, 0), found, products)
    return products


def _inverse(lower: Tensor, masks: BlockMasks) -> Tensor:
    """Of the identity plus a matrix `[..., block, block]` that is zero but below its diagonal."""
    inverse = masks.itself.to(lower.dtype) - torch.where(masks.pairs[0], lower, 0.0)
    for pair in masks.pairs[1:]:
        inverse = inverse - inverse @ (torch.where(pair, lower, 0.0) @ inverse)
    return inverse
