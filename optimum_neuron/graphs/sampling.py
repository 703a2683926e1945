# SPDX-License-Identifier: Apache-2.0
"""The on-device sampler: logits and per-row parameters to tokens. Randomness comes from outside, one number a row."""

from __future__ import annotations

import torch
from torch import Tensor


TOP_K, TOP_P, TEMPERATURE = range(3)


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
    top_k, top_p, temperature = (sampling_params[:, i, None] for i in (TOP_K, TOP_P, TEMPERATURE))
    greedy = temperature <= 0
    scores, candidates = torch.topk(logits, min(max_topk, logits.shape[-1]), dim=-1)
    rank = torch.arange(scores.shape[-1], dtype=torch.float32)
    scores = scores / torch.where(greedy, 1.0, temperature)
    probs = torch.softmax(torch.where(rank < top_k, scores, -3e4), dim=-1)
    cumulative = _cumulative(probs)
    # A token is kept while the probability before it is below top_p, so the first one always is (also at top_p = 0).
    kept = (rank == 0) | ((cumulative - probs < top_p) & (rank < top_k))
    cumulative = _cumulative(torch.where(kept, probs, 0.0))
    beyond = cumulative <= uniforms[:, None] * cumulative[:, -1:]
    # Rounding can leave the last kept token short of the total: never step past it.
    index = torch.minimum(beyond.sum(-1, keepdim=True), kept.sum(-1, keepdim=True) - 1)
    drawn = candidates.gather(-1, index)
    return torch.where(greedy, logits.argmax(-1, keepdim=True), drawn)[:, 0].to(torch.int32)


def _cumulative(probs: Tensor) -> Tensor:
    """Running sum as a product with a triangle of ones: the Neuron compiler takes no cumsum."""
    size = probs.shape[-1]
    order = torch.arange(size)
    return probs @ (order[:, None] <= order[None, :]).to(probs.dtype)
