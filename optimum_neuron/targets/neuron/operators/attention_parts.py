# SPDX-License-Identifier: Apache-2.0
"""Attention in parts: two disjoint sets of keys joined, and what a token sees of compressed ones."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_attention_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Joins attention over two disjoint sets of keys into attention over both.

    A side that saw no key has a log-sum-exp of minus infinity, or one so far below the other's that its weight is zero in
    float32, as where masks are finite. Whatever its output holds is not looked at, so the other side comes back to the
    bit; two sides of minus infinity give 0 and minus infinity. A side that saw a key that is not finite has NaN, and so
    have both together. The rule is that of the online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867).

    Args:
        out_a, out_b: `[..., value_dim]`, normalized outputs of each side.
        lse_a, lse_b: `[...]` float32, natural logarithms of the sums of exponentials of each side's scores.

    Returns:
        The joint output, in the type of `out_a`, and its log-sum-exp in float32.
    """
    empty = -torch.inf
    largest = torch.maximum(lse_a, lse_b)
    reference = torch.where(largest == empty, 0.0, largest)  # -inf - (-inf) is NaN
    weight_a, weight_b = torch.exp(lse_a - reference), torch.exp(lse_b - reference)
    total = (weight_a + weight_b).clamp(min=1.0)  # the larger side's weight is 1, or both are 0
    joint = _share(out_a, weight_a, total) + _share(out_b, weight_b, total)
    return joint.to(out_a.dtype), torch.where(largest == empty, empty, reference + torch.log(total))


def join_attention_states(out: Tensor, lse: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Joins attention over any number of disjoint sets of keys, of which at least one has a finite log-sum-exp.

    The rule is that of `merge_attention_states`. Parts are added up in their order along `dim`, so that a result depends on
    nothing else.

    Args:
        out: `[..., value_dim]` float32, normalized outputs; finite, also of a part that saw no key.
        lse: `[...]` float32; of a part that saw no key so far below the others' that its weight is zero.
        dim: along which parts lie.

    Returns:
        The joint output and its log-sum-exp, without that dimension.
    """
    largest = lse.amax(dim, keepdim=True)
    weights = torch.exp(lse - largest)
    total = weights.sum(dim)
    joint = (out * weights[..., None]).sum(dim) * (1.0 / total)[..., None]
    return joint, largest.squeeze(dim) + torch.log(total)


def _share(out: Tensor, weight: Tensor, total: Tensor) -> Tensor:
    """A side's part of the joint output; zero where its weight is, whatever it holds."""
    return torch.where(weight[..., None] == 0, 0.0, out.float()) * (weight / total)[..., None]
