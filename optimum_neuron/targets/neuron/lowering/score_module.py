# SPDX-License-Identifier: Apache-2.0
"""What is lowered of the graphs over logits that a step left: a step whose requests are all greedy runs without them.

A search of the whole vocabulary has a thousand operators. Apart from the steps they are compiled once for a group of rows, and
not once for every bucket.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ....step.sampling.chosen import ChosenTokens
from ....step.sampling.logprobs import logprobs_of_shard
from ....step.sampling.scores import Scores
from ....step.step import example_inputs
from ..sampler import gathering, of_all, sample
from ..score_graphs import ScoreGraph
from ..sharding import RANK_BUFFER, ShardPlan


class ScoreModule(nn.Module):
    """Draws a token for each row of a group, or tells log-probabilities.

    Args:
        vocab_size: of the whole model.
        plan: how ranks share the logits; None for a single one.
    """

    def __init__(self, graph: ScoreGraph, vocab_size: int, plan: ShardPlan | None) -> None:
        super().__init__()
        self.scores = Scores([(graph.group, graph.scores.shape[0])], graph.scores.shape[1])
        self.chosen = None if graph.chosen is None else ChosenTokens(graph.chosen.shape[0])
        self.model = nn.Module()  # the rank's name in its weights begins so
        if plan is not None:
            self.model.register_buffer(RANK_BUFFER, torch.zeros(1, dtype=torch.int32))
        self.graph = graph
        self._vocab_size, self._plan = vocab_size, plan

    @property
    def ranks(self) -> int:
        return 1 if self._plan is None else self._plan.world_size

    def example_inputs(self) -> tuple[Tensor, ...]:
        return example_inputs(self.graph.inputs)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """As `step.sampling.sampler.sample`, with the slots of the rows behind, or `step.sampling.logprobs.logprobs`."""
        logits: Tensor = getattr(self.scores, self.graph.group)
        if self.chosen is not None:
            sampling_params, uniforms, slots = inputs
            tokens = sample(logits, sampling_params, uniforms, self._first(), self._vocab_size, self.ranks)
            self.chosen.keep(tokens, slots)
            return (tokens,)
        (chosen,) = inputs
        gather = of_all(gathering(self.ranks), self.ranks)
        found = logprobs_of_shard(logits, chosen, self.graph.told, self._first(), self._vocab_size, gather)
        return tuple(found)[: len(self.graph.outputs)]

    def _first(self) -> Tensor:
        """The token of the rank's first column."""
        if self._plan is None:
            return torch.zeros((), dtype=torch.int32)
        rank: Tensor = getattr(self.model, RANK_BUFFER)
        return rank * self._plan.local_vocab_size
