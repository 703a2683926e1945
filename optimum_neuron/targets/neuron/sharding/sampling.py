# SPDX-License-Identifier: Apache-2.0
"""The on-device sampler where each rank has the logits of its own part of the vocabulary."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from ....step.collectives import all_gather
from ....step.ops import StepOps
from ..sampler import largest
from .plan import RANK_BUFFER, ShardPlan


# Tokens travel as float32, which holds whole numbers up to here.
_LARGEST_TOKEN = 2**24


def sharded_ops(base_ops: StepOps, model: nn.Module, plan: ShardPlan) -> StepOps:
    """A step's operators over a rank's logits; every rank chooses the same token, the one of the largest of all logits.

    Args:
        model: as `apply_plan` left it: holds the rank.

    Raises:
        ValueError: the vocabulary is too large.
    """
    if plan.vocab_size > _LARGEST_TOKEN:
        raise plan.refusal(f"its vocabulary of {plan.vocab_size} exceeds {_LARGEST_TOKEN}")

    def largest_of_all(logits: Tensor, sampling_params: Tensor, uniforms: Tensor) -> Tensor:
        first: Tensor = getattr(model, RANK_BUFFER) * plan.local_vocab_size
        return largest(logits, first, plan.vocab_size, plan.world_size)

    def full_logits(logits: Tensor) -> Tensor:
        return all_gather(logits, 1, plan.world_size)[:, : plan.vocab_size]

    return replace(base_ops, sample=largest_of_all, full_logits=full_logits)
