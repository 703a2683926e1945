# SPDX-License-Identifier: Apache-2.0
"""The on-device sampler where each rank has the logits of its own part of the vocabulary."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from ....graphs.attention import MASKED
from ....graphs.collectives import all_gather
from ....graphs.ops import StepOps
from ....graphs.sampling import choose, first_largest
from .plan import RANK_BUFFER, ShardPlan


# Tokens travel beside their scores in one collective, as float32, which holds whole numbers up to here.
_LARGEST_TOKEN = 2**24


def sharded_ops(base_ops: StepOps, model: nn.Module, plan: ShardPlan) -> StepOps:
    """A step's operators over a rank's logits; every rank chooses the same token, that of the whole logits.

    Args:
        model: as `apply_plan` left it: holds the rank.

    Raises:
        ValueError: the vocabulary is too large.
    """
    if plan.vocab_size > _LARGEST_TOKEN:
        raise plan.refusal(f"its vocabulary of {plan.vocab_size} exceeds {_LARGEST_TOKEN}")

    def sample(logits: Tensor, sampling_params: Tensor, uniforms: Tensor, max_topk: int) -> Tensor:
        first = getattr(model, RANK_BUFFER) * plan.local_vocab_size
        if plan.world_size * plan.local_vocab_size > plan.vocab_size:
            tokens = torch.arange(plan.local_vocab_size, dtype=torch.int32) + first
            logits = torch.where(tokens < plan.vocab_size, logits, MASKED)
        scores, candidates = torch.topk(logits, min(max_topk, logits.shape[-1]), dim=-1)
        own = torch.cat([candidates.to(torch.int32), first_largest(logits)], dim=-1) + first
        own = own.clamp(max=plan.vocab_size - 1)  # where logits are NaN, a padded column may count as the largest
        return _choose(torch.cat([scores, own.float()], dim=-1), plan, max_topk, sampling_params, uniforms)

    def full_logits(logits: Tensor) -> Tensor:
        return all_gather(logits, 1, plan.world_size)[:, : plan.vocab_size]

    return replace(base_ops, sample=sample, full_logits=full_logits)


def _choose(own: Tensor, plan: ShardPlan, max_topk: int, sampling_params: Tensor, uniforms: Tensor) -> Tensor:
    """Joins the ranks' candidates: `own [rows, k + k + 1]` are scores, their tokens, and the greedy token."""
    k = own.shape[-1] // 2
    ranks = all_gather(own, 1, plan.world_size).unflatten(1, (plan.world_size, -1))
    scores, tokens, greedy = ranks[..., :k].flatten(1), ranks[..., k:-1].flatten(1), ranks[..., -1]
    scores, places = torch.topk(scores, min(max_topk, plan.vocab_size), dim=-1)
    # Ranks are in the order of their tokens, so the first of the largest has the lowest token.
    best = torch.arange(plan.world_size, dtype=torch.int32) == first_largest(ranks[..., 0])
    return choose(
        scores,
        tokens.gather(-1, places).to(torch.int32),
        torch.where(best, greedy, 0.0).amax(-1, keepdim=True).to(torch.int32),
        sampling_params,
        uniforms,
    )
