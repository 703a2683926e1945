# SPDX-License-Identifier: Apache-2.0
"""The on-device sampler: from logits and per-row parameters to tokens. Randomness comes from outside, one number a row.

Written with what every target can lower: no cumulative sum, no sort but top-k, no 64-bit index.
"""

from __future__ import annotations

import torch
from torch import Tensor


TOP_K, TOP_P, TEMPERATURE = range(3)
# A difference of two scores whose exponential is exactly 0 in float32.
_NO_WEIGHT = -3e4


def sample(logits: Tensor, sampling_params: Tensor, uniforms: Tensor, max_topk: int) -> Tensor:
    """Chooses one token per row.

    Temperature 0 is the exact argmax (lowest index on a tie). Otherwise temperature, top-k and top-p are applied in
    transformers' order, and the token is drawn by inverse CDF: the first kept token, in order of falling probability,
    whose cumulative probability exceeds `uniform * total`.

    Args:
        logits: `[rows, vocab]` float32.
        sampling_params: `[rows, 3]` float32: top_k, top_p, temperature; top_k is in 1..max_topk.
        uniforms: `[rows]` float32 in [0, 1).
        max_topk: candidates considered, the largest top_k.

    Returns:
        `[rows]` int32.
    """
    scores, candidates = torch.topk(logits, min(max_topk, logits.shape[-1]), dim=-1)
    return choose(scores, candidates.to(torch.int32), first_largest(logits), sampling_params, uniforms)


def first_largest(logits: Tensor) -> Tensor:
    """`[rows, 1]` int32: the argmax of `[rows, vocab]`, the lowest index on a tie; as torch's, NaN is the largest."""
    size = logits.shape[-1]
    index = torch.arange(size, dtype=torch.int32)
    largest = logits.amax(-1, keepdim=True)
    # By what is less, not by what is equal: so there is an index whatever a device makes of NaN.
    less = (logits < largest) | (largest.isnan() & ~logits.isnan())
    return torch.where(less, size, index).amin(-1, keepdim=True)


def choose(
    scores: Tensor, candidates: Tensor, greedy_tokens: Tensor, sampling_params: Tensor, uniforms: Tensor
) -> Tensor:
    """Draws one of the candidates, or takes the greedy token where the temperature is 0 or the largest score not finite.

    Args:
        scores: `[rows, k]` float32, the largest logits of each row, falling.
        candidates: `[rows, k]` int32, their tokens.
        greedy_tokens: `[rows, 1]` int32.
        sampling_params, uniforms: as in `sample`.

    Returns:
        `[rows]` int32.
    """
    top_k, top_p, temperature = (sampling_params[:, i, None] for i in (TOP_K, TOP_P, TEMPERATURE))
    greedy = temperature <= 0
    rank = torch.arange(scores.shape[-1], dtype=torch.float32)
    scores = scores / torch.where(greedy, 1.0, temperature)
    # Candidates that are tied with the last one within top_k stay, as in transformers; beside NaN, all: nothing is drawn.
    within = ~(scores < torch.where(rank < top_k, scores, scores[:, :1]).amin(-1, keepdim=True))
    weights = torch.exp(torch.where(within, scores - scores[:, :1], _NO_WEIGHT))
    total = weights.sum(-1, keepdim=True)
    probs = weights / total
    # A token is kept while the probability before it is below top_p, so the first one always is (also at top_p = 0).
    kept = (rank == 0) | ((_cumulative(probs) - probs < top_p) & within)
    cumulative = _cumulative(torch.where(kept, probs, 0.0))
    beyond = cumulative <= uniforms[:, None] * cumulative[:, -1:]
    # Rounding can leave the last kept token short of the total: never step past it.
    index = torch.minimum(beyond.float().sum(-1, keepdim=True), kept.float().sum(-1, keepdim=True) - 1)
    drawn = torch.where(rank == index, candidates, 0).amax(-1, keepdim=True)
    # Logits with NaN or infinity leave nothing to draw from, and which of them comes first is up to the target.
    return torch.where(greedy | total.isnan(), greedy_tokens, drawn)[:, 0]


def _cumulative(probs: Tensor) -> Tensor:
    """Running sum as a product with a triangle of ones: the Neuron compiler takes no cumsum."""
    order = torch.arange(probs.shape[-1], dtype=torch.int32)
    return probs @ (order[:, None] <= order[None, :]).to(probs.dtype)
