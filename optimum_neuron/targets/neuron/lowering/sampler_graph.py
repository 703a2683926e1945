# SPDX-License-Identifier: Apache-2.0
"""The graph that draws tokens from the logits that a step left: a step whose requests are all greedy runs without it.

A search of the whole vocabulary has a thousand operators. Apart from the steps they are compiled once for a group of rows, and
not once for every bucket.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ....graphs.scores import Scores
from ....graphs.spec import TensorSpec, sampler_inputs
from ....graphs.step import example_inputs
from ..sampler import sample
from ..sharding import RANK_BUFFER, ShardPlan, sample_own


class Sampler(nn.Module):
    """Draws a token for each row of a group.

    Args:
        scores: has the group.
        vocab_size: of the whole model.
        plan: how ranks share the logits; None for a single one.
    """

    def __init__(self, group: str, scores: Scores, vocab_size: int, plan: ShardPlan | None) -> None:
        super().__init__()
        self.scores = scores
        self.model = nn.Module()  # the rank's name in its weights begins so
        if plan is not None:
            self.model.register_buffer(RANK_BUFFER, torch.zeros(1, dtype=torch.int32))
        self._group, self._vocab_size, self._plan = group, vocab_size, plan

    @property
    def _rows(self) -> int:
        rows: int = getattr(self.scores, self._group).shape[0]
        return rows

    def inputs(self) -> tuple[TensorSpec, ...]:
        return sampler_inputs(self._group, self._rows)

    def outputs(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec(f"{self._group}.tokens", (self._rows,), "int32"),)

    def example_inputs(self) -> tuple[Tensor, ...]:
        return example_inputs(self.inputs())

    def forward(self, sampling_params: Tensor, uniforms: Tensor) -> tuple[Tensor, ...]:
        """As `graphs.sampling.sample`."""
        logits: Tensor = getattr(self.scores, self._group)
        if self._plan is not None:
            return (sample_own(self.model, self._plan, logits, sampling_params, uniforms),)
        first = torch.zeros((), dtype=torch.int32)
        return (sample(logits, sampling_params, uniforms, first, self._vocab_size, 1),)
