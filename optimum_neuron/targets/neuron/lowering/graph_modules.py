# SPDX-License-Identifier: Apache-2.0
"""Modules that are lowered to the graphs that are no steps.

A search of the whole vocabulary has a thousand operators. Apart, it is compiled once for a group of rows, and greedy steps run without it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from ....step.attention.kv_cache import KVCache
from ....step.sampling.buffers import ChosenTokens, Scores
from ....step.sampling.logprobs import logprobs
from ..graphs.io import CACHE, SNAPSHOTS
from ..graphs.state_graphs import StateGraph
from ..operators.sampler import of_all, sample
from ..sharding import RANK_BUFFER, ShardPlan


class ScoreModule(nn.Module):
    """A draw of a token for each row of a group, or its log-probabilities; without a plan, of a single rank's logits."""

    def __init__(self, graph: StateGraph, vocab_size: int, plan: ShardPlan | None) -> None:
        super().__init__()
        (scores,) = graph.read
        self.scores = Scores([(graph.group, scores.shape[0])], scores.shape[1])
        self.chosen = ChosenTokens(graph.updated[0].shape[0]) if graph.updated else None
        self.model = nn.Module()  # the rank's name in its weights begins so
        if plan is not None:
            self.model.register_buffer(RANK_BUFFER, torch.zeros(1, dtype=torch.int32))
        self._graph, self._vocab_size, self._plan = graph, vocab_size, plan

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Compute `step.sampling.sampler.sample` with the rows' slots, or `step.sampling.logprobs.logprobs`."""
        logits: Tensor = getattr(self.scores, self._graph.group)
        ranks = 1 if self._plan is None else self._plan.world_size
        if self.chosen is not None:
            sampling_params, uniforms, slots = inputs
            tokens = sample(logits, sampling_params, uniforms, self._first_token(), self._vocab_size, ranks)
            self.chosen.keep_tokens(tokens, slots)
            return (tokens,)
        (chosen,), outputs = inputs, self._graph.outputs
        count = outputs[-1].shape[1] if len(outputs[-1].shape) > 1 else 0
        found = logprobs(logits, chosen, count, self._first_token(), self._vocab_size, of_all(ranks))
        return tuple(found)[: len(outputs)]

    def _first_token(self) -> Tensor:
        if self._plan is None:
            return torch.zeros((), dtype=torch.int32)
        return self.model.get_buffer(RANK_BUFFER) * self._plan.local_vocab_size


class SlotCopy(nn.Module):
    """A copy as `step.attention.kv_cache.copy_slot`: whole rows move, columns beyond the length stay."""

    def __init__(self, graph: StateGraph) -> None:
        super().__init__()
        self.kv_cache = KVCache(graph.updated)

    def forward(self, source: Tensor, destination: Tensor, length: Tensor) -> tuple[Tensor, ...]:
        """Copy a row; the arguments are `[1]` int32."""
        for state in self.kv_cache.buffers():
            columns = torch.arange(state.shape[2], dtype=torch.int32)
            kept = (columns < length)[None, None, :, None]
            row = torch.where(kept, state.index_select(0, source), state.index_select(0, destination))
            state.index_put_((destination,), row)
        return ()


class StateCopy(nn.Module):
    """Copies as `HostStates.keep_state` and `restore_state`: a row is selected whole and written over the other, whatever that holds."""

    def __init__(self, graph: StateGraph) -> None:
        super().__init__()
        # Named so, buffers are called what the states are.
        self.kv_cache = KVCache(each for each in graph.states if each.name.startswith(CACHE))
        self.snapshots = nn.Module()
        kept = [each for each in graph.states if each.name.startswith(SNAPSHOTS)]
        self.snapshots.kv_cache = KVCache(replace(each, name=each.name.removeprefix(SNAPSHOTS)) for each in kept)
        self._names = [(one.name, other.name) for one, other in zip(graph.read, graph.updated, strict=True)]

    def forward(self, source: Tensor, destination: Tensor, length: Tensor) -> tuple[Tensor, ...]:
        """Copy a row of each state; the arguments are `[1]` int32."""
        for read, updated in self._names:
            one, other = self.get_buffer(read), self.get_buffer(updated)
            copied = (length > 0).view([1] * other.dim())
            row = torch.where(copied, one.index_select(0, source), other.index_select(0, destination))
            other.index_put_((destination,), row)
        return ()
