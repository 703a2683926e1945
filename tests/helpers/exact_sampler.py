# SPDX-License-Identifier: Apache-2.0
"""The sampler's definition once more, by a sort and Python's integers: what every formulation of it has to choose."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from optimum_neuron.step.sampling.sampler import weights_of


def choose_exactly(logits: Tensor, params: tuple[float, float, float, float], uniform: float) -> int:
    """The token of one row `[vocab]`, by top_k, top_p, temperature and min_p."""
    top_k, top_p, temperature, min_p = (np.float32(each) for each in params)
    best = int(logits.argmax())
    scores = logits / torch.tensor(temperature if temperature > 0 else 1.0)
    if temperature <= 0 or not bool(scores[best].isfinite()):
        return best
    weights = [int(each) for each in weights_of(scores[best] - scores).tolist()]
    order = sorted(range(len(weights)), key=lambda token: -float(scores[token]))
    if 1 <= top_k < len(order):
        worst = float(scores[order[int(np.ceil(top_k)) - 1]])
        order = [token for token in order if float(scores[token]) >= worst]
    if top_p < 1:
        order = _nucleus(order, scores, weights, top_p)
    kept = sorted(token for token in order if np.float32(weights[token]) >= min_p * np.float32(2**36))
    target = int(np.floor(np.float32(uniform) * _rounded(sum(weights[token] for token in kept))))
    passed = 0
    for token in kept:
        passed += weights[token]
        if passed > target:
            return token
    return max(token for token in kept if weights[token])


def _nucleus(order: list[int], scores: Tensor, weights: list[int], top_p: np.float32) -> list[int]:
    """The tokens before which less than top_p lies, and those that tie with the last."""
    wanted = max(int(np.ceil(top_p * _rounded(sum(weights[token] for token in order)))), 1)
    passed, worst = 0, -np.inf
    for token in order:
        if passed < wanted:
            worst = float(scores[token])
        passed += weights[token]
    return [token for token in order if float(scores[token]) >= worst]


def _rounded(number: int) -> np.float32:
    """As float32, by digits of base 4096."""
    rounded = np.float32(0)
    for shift in (36, 24, 12, 0):
        rounded = np.float32(rounded * np.float32(4096)) + np.float32(number >> shift & (4095 if shift < 36 else -1))
    return rounded
