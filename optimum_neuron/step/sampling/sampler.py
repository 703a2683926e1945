# SPDX-License-Identifier: Apache-2.0
"""The on-device sampler.

It uses only what every target can lower: no sort, no top-k, no cumulative sum, no integer that float32 cannot hold. A token's weight is a
whole number, so sums are exact: no order of summation, and no cut of the vocabulary, changes a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .exact_sums import (
    FloatSteps,
    is_less,
    largest_float,
    pad_tokens,
    pick_part,
    split_blocks,
    sum_tokens,
    to_digits,
    to_float,
    widen_digits,
)


TOP_K, TOP_P, TEMPERATURE, MIN_P = range(4)
# The weight of the best token; one of a 2^-36th of its probability or less counts for nothing.
WHOLE = 2.0**36
_WEIGHT_DIGITS = 3
# exp(-x) = 2^-n * exp(-r) with x = n * ln 2 + r. The two parts of ln 2 have few bits, so that their products are exact.
_PER_LN_2, _LN_2, _LN_2_REST = 1.44269504, 0.6931381225585938, 9.05798515304923e-06
# exp(-r) * 2^23 for r in 0..ln 2, by whole coefficients of r, -r^2, ...; relative error 1e-7 before rounding.
_SERIES = (49538.0, 334538.0, 1392892.0, 4193494.0, 8388566.0, 8388608.0)
_WEIGHTLESS, _HALVING_BITS = 40.0, 6  # a distance at which a weight is 0, and n small enough for exact products
_UNREACHABLE = 2.0**25
# The search of the smallest score of the kept: exponents and mantissas tried at a time, from their highest digits.
_STEPS = FloatSteps(
    ((64.0, 8), (8.0, 8), (1.0, 8)),
    ((2.0**20, 8), (2.0**16, 16), (2.0**12, 16), (2.0**8, 16), (2.0**4, 16), (1.0, 16)),
)
_LOWEST = torch.finfo(torch.float32).min


def sample(logits: Tensor, sampling_params: Tensor, uniforms: Tensor) -> Tensor:
    """Choose one token per row, `[rows]` int32.

    Temperature 0 is the exact argmax (lowest index on a tie). Otherwise temperature, top-k, top-p and min-p are applied in transformers'
    order. All tokens that tie with the last one kept stay. The token is drawn by inverse CDF: the first one, in order of token ids, at
    which the sum of kept weights exceeds `uniform * total`. Where the largest logit, or that over the temperature, is not finite, the
    argmax is taken.

    Args:
        logits: `[rows, columns]` float32.
        sampling_params: `[rows, 4]` float32: top_k (below 1: none), top_p, temperature, min_p.
        uniforms: `[rows]` float32 in [0, 1).
    """
    temperature = sampling_params[:, TEMPERATURE]
    greedy = temperature <= 0
    divisor = torch.where(greedy, 1.0, temperature)[:, None]
    best = logits.amax(-1, keepdim=True) / divisor
    drawn = draw_tokens(kept_weights(logits / divisor, best, sampling_params), uniforms)
    drawable = (best.abs() <= -_LOWEST)[:, 0]
    return torch.where(greedy | ~drawable, first_largest(logits)[:, 0].float(), drawn).to(torch.int32)


def kept_weights(scores: Tensor, best: Tensor, sampling_params: Tensor) -> Tensor:
    """Return weights as digits, `[digits, rows, size]` float32, padded; 0 for tokens that are left out. `best [rows, 1]` are the largest."""
    top_k, top_p, min_p = (sampling_params[:, i] for i in (TOP_K, TOP_P, MIN_P))
    real = pad_tokens(torch.ones_like(scores), 0.0)
    scores = pad_tokens(scores, _LOWEST)
    wanted = torch.where(top_k < 1, _UNREACHABLE, top_k)[:, None]
    kept = (real > 0) & _keep_largest(scores, real[None], wanted)
    weights = weights_of(best - scores)
    digits = torch.where(kept, to_digits(weights, _WEIGHT_DIGITS).movedim(-1, 0), 0.0)
    whole = sum_tokens(digits)
    # The sum that the tokens within top-p reach; at least 1, so that there is one.
    nucleus = to_digits((top_p * to_float(whole)).ceil().clamp(min=1.0), whole.shape[-1])
    # All tokens at top_p = 1, also where rounding makes the product less than the whole.
    nucleus = torch.where(top_p[:, None] < 1, nucleus, _UNREACHABLE)
    kept = _keep_largest(scores, digits, nucleus)
    return torch.where(kept & (weights >= min_p[:, None] * WHOLE), digits, 0.0)


def first_largest(logits: Tensor) -> Tensor:
    """Return `[rows, 1]` int32: the argmax of `[rows, vocab]`, the lowest index on a tie; as torch's, NaN is the largest."""
    size = logits.shape[-1]
    index = torch.arange(size, dtype=torch.int32)
    largest = logits.amax(-1, keepdim=True)
    # By what is less, not by what is equal: so there is an index whatever a device makes of NaN.
    less = (logits < largest) | (largest.isnan() & ~logits.isnan())
    return torch.where(less, size, index).amin(-1, keepdim=True)


def weights_of(distances: Tensor) -> Tensor:
    """Return `exp(-distance) * 2^36` in whole numbers, float32, of distances from 0 on; at most a few units of the last place off.

    No sum follows a rounded product, so no compiler can make one operation of the two, which changes bits.
    """
    distances = distances.clamp(max=_WEIGHTLESS)
    halvings = (distances * _PER_LN_2).floor()
    rest = (distances - halvings * _LN_2 - halvings * _LN_2_REST).clamp(min=0.0)
    series = torch.full_like(rest, _SERIES[0])
    for coefficient in _SERIES[1:]:
        series = coefficient - (series * rest).floor()
    power = torch.full_like(rest, 2.0**13)
    for bit in reversed(range(_HALVING_BITS)):
        has = halvings >= 2.0**bit
        halvings = halvings - torch.where(has, 2.0**bit, 0.0)
        power = power * torch.where(has, 2.0 ** -(2**bit), 1.0)
    return (series * power).floor()


def _keep_largest(scores: Tensor, digits: Tensor, target: Tensor) -> Tensor:
    """Return `[rows, size]` bool: the fewest tokens of the largest scores with numbers that add up to `target`, with all ties; else all.

    The smallest of their scores is found digit by digit. Tokens have the numbers `digits [digits, rows, size]`; `target` is
    `[rows, digits]`, with a digit more, unless that is one.
    """

    def count_found(lowest: Tensor) -> Tensor:
        """Count the scores of `[rows, n]`, in their order, that are not too high."""
        counted = scores[:, None] >= lowest[..., None]
        sums = sum_tokens(torch.where(counted, digits[:, :, None], 0.0))
        return (~is_less(sums, target[:, None])).float().sum(-1, keepdim=True)

    return scores >= largest_float(count_found, scores[:, :1], _STEPS)


def draw_tokens(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return `[rows]` float32: each row's token, by inverse CDF in the order of tokens, from the weights of `kept_weights`."""
    end = sum_tokens(weights)
    target = to_digits((uniforms * to_float(end)).floor(), end.shape[-1])
    last = torch.cat([end[:, :-1], end[:, -1:] - 1], dim=-1)
    target = torch.where(is_less(target, end)[:, None], target, last)  # rounding may reach the end
    base, token = torch.zeros_like(end), torch.zeros_like(uniforms)
    parts = split_blocks(weights).movedim(0, -1)  # [rows, blocks, groups, 16, 16, digits]
    while parts.ndim > 2:
        sums = parts.flatten(2, -2).sum(2) if parts.ndim > 3 else parts
        index, base = pick_part(widen_digits(sums), base, target)
        token = token * parts.shape[1] + index
        chosen = torch.arange(parts.shape[1], dtype=torch.int32) == index[:, None]
        parts = torch.where(chosen.unflatten(-1, (-1, *[1] * (parts.ndim - 2))), parts, 0.0).sum(1)
    return token


_DIGITS = 4  # of sums, in base 4096: all but the highest are below it


def sample_by_sorting(logits: Tensor, sampling_params: Tensor, uniforms: Tensor) -> Tensor:
    """Choose tokens as `sample` does."""
    greedy = first_largest(logits)
    temperature = sampling_params[:, TEMPERATURE]
    best = logits.gather(-1, greedy.long())[:, 0] / temperature
    draws = ~(temperature <= 0) & best.isfinite()
    tokens = greedy[:, 0]
    if draws.any():
        params = sampling_params[draws]
        scores = logits[draws] / params[:, TEMPERATURE, None]
        weights = weights_of(best[draws, None] - scores)
        kept = _keep_sorted(scores, weights.long(), params) & (weights >= params[:, MIN_P, None] * WHOLE)
        ends = torch.where(kept, weights.long(), 0).cumsum(-1)
        target = (uniforms[draws] * _round_sums(ends[:, -1])).floor().long()
        tokens[draws] = (ends <= target.clamp(max=ends[:, -1] - 1)[:, None]).sum(-1, dtype=torch.int32)
    return tokens


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
