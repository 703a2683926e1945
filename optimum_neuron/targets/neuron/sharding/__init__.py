# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: the part of a model that each rank holds, and how its modules compute on it."""

from .modules import apply_plan, sharded_ops
from .plan import RANK_BUFFER, RANK_TENSOR, ShardPlan
from .planner import shard_plan, whole_plan
from .weights import tied_names, write_sharded_weights


__all__ = [
    "RANK_BUFFER", "RANK_TENSOR", "ShardPlan", "apply_plan", "shard_plan", "sharded_ops", "tied_names", "whole_plan",
    "write_sharded_weights",
]  # fmt: skip
