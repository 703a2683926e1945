# SPDX-License-Identifier: Apache-2.0
"""The sampler for step modules that run as they are, by sorting.

It chooses the tokens of step/sampling/sampler.py, which uses only what every device can do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .exact_sums import to_float
from .sampler import MIN_P, TEMPERATURE, TOP_K, TOP_P, WHOLE, first_largest, weights_of


_DIGITS = 4  # of sums, in base 4096: all but the highest are below it


def sample_by_sorting(logits: Tensor, sampling_params: Tensor, uniforms: Tensor) -> Tensor:
    """Choose tokens as `sample` does."""
    greedy = first_largest(logits)
    temperature = sampling_params[:, TEMPERATURE]
    best = logits.gather(-1, greedy.long())[:, 0] / temperature
    draws = ~(temperature <= 0) & best.isfinite()
    tokens = greedy[:, 0]
    if draws.any():
        tokens[draws] = _draw_sorted(logits[draws], best[draws], sampling_params[draws], uniforms[draws])
    return tokens


def _draw_sorted(logits: Tensor, best: Tensor, params: Tensor, uniforms: Tensor) -> Tensor:
    scores = logits / params[:, TEMPERATURE, None]
    weights = weights_of(best[:, None] - scores)
    kept = _keep_sorted(scores, weights.long(), params) & (weights >= params[:, MIN_P, None] * WHOLE)
    ends = torch.where(kept, weights.long(), 0).cumsum(-1)
    target = (uniforms * _round_sums(ends[:, -1])).floor().long()
    return (ends <= target.clamp(max=ends[:, -1] - 1)[:, None]).sum(-1, dtype=torch.int32)


def _keep_sorted(scores: Tensor, weights: Tensor, params: Tensor) -> Tensor:
    """Return `[rows, vocab]` bool: the tokens that top-k leaves, and of those top-p, with ties."""
    top_k, top_p = params[:, TOP_K, None], params[:, TOP_P, None]
    if not ((top_k >= 1) | (top_p < 1)).any():
        return torch.ones_like(scores, dtype=torch.bool)
    ranked, order = scores.sort(dim=-1, descending=True)
    size = scores.shape[-1]
    places = torch.where(top_k < 1, size, top_k.ceil()).clamp(max=size).long()
    kept = ranked >= ranked.gather(-1, places - 1)
    ends = torch.where(kept, weights.gather(-1, order), 0).cumsum(-1)
    wanted = (top_p * _round_sums(ends[:, -1:])).ceil().clamp(min=1.0).long()
    before = torch.where((top_p < 1) & (wanted <= ends[:, -1:]), (ends < wanted).sum(-1, keepdim=True), size - 1)
    lowest = ranked.gather(-1, torch.minimum(before, kept.sum(-1, keepdim=True) - 1))
    return scores >= lowest


def _round_sums(sums: Tensor) -> Tensor:
    """Return sums as `to_float` rounds them."""
    digits = [sums >> 12 * place for place in range(_DIGITS - 1, -1, -1)]
    return to_float(torch.stack([digits[0], *(digit & 4095 for digit in digits[1:])], dim=-1).float())
