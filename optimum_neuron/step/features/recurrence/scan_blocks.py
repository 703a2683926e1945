# SPDX-License-Identifier: Apache-2.0
"""Blocks of a recurrence: all that products of whole blocks can compute.

A compiler may contract a product and a sum in the code of one block and not in that of another. So only the states between blocks are
computed block by block, with a selection between each product and sum. Decays are summed where they are needed, never subtracted: a sum
over many tokens has lost what few of them add. The delta rule solves a triangular system per block, by inverses of its diagonal blocks of
twice the size each time. That is as exact as substitution; powers of the matrix are not, where a prompt repeats a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .recurrence import ScanCall


@dataclass(frozen=True)
class BlockMasks:
    """The order of a block's tokens, `[block, block]` each: row i, column j. Whether j is `until` i, or `before` it.

    By doubling width, `pairs` say whether i is in the second of two neighboring parts and j in the first, each j before i once, and `parts`
    whether i and j are in the same part.
    """

    until: Tensor
    before: Tensor
    pairs: tuple[Tensor, ...]
    parts: tuple[Tensor, ...]

    @property
    def itself(self) -> Tensor:
        return self.until & ~self.before

    @classmethod
    def for_block(cls, block: int) -> BlockMasks:
        place = torch.arange(block, dtype=torch.int32)
        row, column = place[:, None], place[None]
        pairs, parts, width = [], [], 1
        while width < block:
            own, other = row & -width, column & -width
            pairs.append((own == other + width) & ((other & width) == 0))
            parts.append(own == other)
            width *= 2
        return cls(row >= column, row > column, tuple(pairs), tuple(parts))


@dataclass(frozen=True)
class _Products:
    """Products of all blocks that need no state; everything is `[blocks, heads, block, ...]`.

    Attributes:
        scores: `[.., block, block]`, of each token's query and of the keys until it, decayed.
        queries, keys: read the state before the block, and add to the one after it; both decayed.
        values: what a block adds, but for what the state before it predicts (delta rule), which `predicting` keys read.
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
        """Return the state after a block from the one before it, `[1, heads, key_dim, value_dim]`."""
        at = slice(number, number + 1)
        added = self.keys[at].transpose(-1, -2) @ self._added_values(at, state)
        state, broken = self.decay[at] * state, self.broken[at, :, -1:]
        return torch.where(broken == 0, state, broken) + added

    def compute_outputs(self, states: Tensor) -> Tensor:
        """Return `[blocks, heads, block, value_dim]` from the states before all blocks `[blocks, heads, key_dim, value_dim]`."""
        return self.queries @ states + self.scores @ self._added_values(slice(None), states) + self.broken

    def _added_values(self, at: slice, states: Tensor) -> Tensor:
        return self.values[at] if self.predicting is None else self.values[at] - self.predicting[at] @ states


@dataclass(frozen=True)
class _Parts:
    """The inputs of all blocks, `[blocks, heads, block, ...]`; `decay` and `beta` have a last dimension, of 1 where a head has one."""

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    beta: Tensor | None
    broken: Tensor


@dataclass(frozen=True)
class _States:
    """All states of each block in a selective scan, as if it began with zeros: no product of queries and keys expresses them.

    `decays` are factors of a state before the block until each token, `sums` what the tokens until it add, both
    `[blocks, heads, block, key_dim, value_dim]`; `queries` `[blocks, heads, block, key_dim]`.
    """

    decays: Tensor
    sums: Tensor
    queries: Tensor
    broken: Tensor

    def next_state(self, number: int, state: Tensor) -> Tensor:
        at = slice(number, number + 1)
        state, broken = self.decays[at, :, -1] * state, self.broken[at, :, -1:]
        return torch.where(broken == 0, state, broken) + self.sums[at, :, -1]

    def compute_outputs(self, states: Tensor) -> Tensor:
        after = self.decays * states[:, :, None] + self.sums + self.broken[..., None]
        return (after * self.queries[..., None]).sum(-2)


# All blocks of a step, computed as far as no state is needed.
Blocks = _Products | _States


def compute_blocks(call: ScanCall, inputs: Tensor, queries: Tensor, nan: Tensor, masks: BlockMasks) -> Blocks:
    """Compute all that needs no state, from inputs and queries `[blocks, block, ...]`; `nan [blocks, block]` is NaN for a broken token."""
    parts = _split_parts(call, inputs, queries, nan, masks)
    if call.rates is not None:
        return _sum_states(parts, call.rates)
    scores, products = _score_pairs(parts, masks)
    # Decays of the state before the block until each token, and of what a token adds, until the block's end.
    until = _sum_masked(masks.until, parts.decay).exp()
    after = _sum_masked(masks.before.t(), parts.decay).exp()
    values, predicting = parts.value, None
    if parts.beta is not None:
        # The inverse of the identity plus a matrix that is zero but below its diagonal.
        lower = torch.where(masks.before, parts.beta * products, 0.0)
        solve = masks.itself.to(lower.dtype) - torch.where(masks.pairs[0], lower, 0.0)
        for pair in masks.pairs[1:]:
            solve = solve - solve @ (torch.where(pair, lower, 0.0) @ solve)
        values, predicting = solve @ (parts.beta * values), solve @ (parts.beta * parts.key * until)
    whole = until[:, :, -1, :, None]
    return _Products(scores, parts.query * until, parts.key * after, values, predicting, whole, parts.broken)


def _sum_states(parts: _Parts, rates: Tensor) -> Blocks:
    """Sum over twice as many tokens each time: log2(block) steps, in each of which a token looks at one before it."""
    decays, block = parts.decay, parts.key.shape[2]
    # By values: a selection by place is none in the code of a block's last token, which a compiler may know.
    kept = parts.broken[..., None] == 0
    sums = torch.where(kept, parts.key[..., None] * parts.value[..., None, :], 0.0)
    width = 1
    while width < block:
        earlier = (decays[..., None, :] * rates).exp() * _shift_tokens(sums, width)
        sums = sums + torch.where(kept, earlier, 0.0)
        decays = decays + _shift_tokens(decays, width)
        width *= 2
    return _States((decays[..., None, :] * rates).exp(), sums, parts.query, parts.broken)


def _shift_tokens(x: Tensor, width: int) -> Tensor:
    return nn.functional.pad(x[:, :, :-width], (0, 0) * (x.dim() - 3) + (width, 0))


def _split_parts(call: ScanCall, inputs: Tensor, queries: Tensor, nan: Tensor, masks: BlockMasks) -> _Parts:
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


def _sum_masked(mask: Tensor, x: Tensor) -> Tensor:
    """Sum `[blocks, heads, block, n]` over a mask's tokens, by a product for each: in one, a library may sum some rows otherwise."""
    return mask.to(x.dtype).expand(*x.shape[:2], *mask.shape) @ x


def _repeat_twice(x: Tensor, dim: int) -> Tensor:
    return torch.cat([x, x], dim)


def _score_pairs(parts: _Parts, masks: BlockMasks) -> tuple[Tensor, Tensor]:
    """Return products of queries and of keys with the keys until them, decayed: `[blocks, heads, block, block]` each."""
    both = torch.cat([parts.query, parts.key], 2)
    block = len(masks.until)
    if parts.decay.shape[-1] == 1:
        # The decays of the tokens after j until i, for each pair in one product.
        later = torch.where(masks.before, parts.decay, 0.0)
        decays = _sum_masked(masks.until, later).exp()
        products = both @ parts.key.transpose(-1, -2) * _repeat_twice(decays, 2)
    else:
        products = _decayed_products(both, parts, masks)
    query, key = (torch.where(masks.until, each, 0.0) for each in products.split(block, 2))
    return query, key


def _decayed_products(both: Tensor, parts: _Parts, masks: BlockMasks) -> Tensor:
    # A pair's decay is that from j to the end of its part, and that from there to i: neither exceeds 1 in any part.
    same = (both * _repeat_twice(parts.key, 2)).sum(-1, keepdim=True)
    products = torch.where(_repeat_twice(masks.itself, 0), same, 0.0)
    for pair, part in zip(masks.pairs, masks.parts, strict=True):
        until = _sum_masked(part & masks.until, parts.decay).exp()
        after = _sum_masked(part & masks.before.t(), parts.decay).exp()
        found = (both * _repeat_twice(until, 2)) @ (parts.key * after).transpose(-1, -2)
        products = torch.where(_repeat_twice(pair, 0), found, products)
    return products
