# SPDX-License-Identifier: Apache-2.0
"""Lowers all graphs of an artifact from its config alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from torch.export import ExportedProgram

from .... import progress
from ....config import NeuronConfig
from ....parity.inspect import check_snapshots
from ....step.kv_cache import KVCache
from ....step.spec import graph_specs
from ....step.state_specs import state_specs
from ..copy_graphs import copy_graphs
from ..score_graphs import score_graphs
from ..sdk.hardware import chip_of
from .kernel_calls import called_kernels
from .lower import LoweredGraph, lower_copy, lower_scores, lower_step
from .ops import ops_for
from .rank_model import rank_model
from .split_tokens import SumsRule


def lower_all(
    folder: Path,
    config: NeuronConfig,
    tied_weights: Mapping[str, str],
    *,
    trust_remote_code: bool,
    like: NeuronConfig | None = None,
    split: frozenset[str] | None = None,
    first: ExportedProgram | None = None,
) -> Iterator[LoweredGraph]:
    """Yields all graphs of a config as they are lowered: steps, what reads their logits, and what copies prefixes and state.

    Args:
        folder: holds the model's config.json, and its modeling code where that is trusted.
        tied_weights: alias to stored name; where none are known yet, tied weights become inputs of their own.
        like: whose largest graph of each kind tells the form of experts; None: each graph has that of its own size.
        split: kinds of graphs whose ranks split tokens; None: each graph does where it takes less time.
        first: that of `trace_first` for this model and config, where there is one; it is changed.

    Raises:
        ValueError: the model cannot be lowered, or not be shared by so many ranks; or kernels, or snapshots of state, have no use in it.
    """
    ranks, specs = config.tensor_parallel_size, graph_specs(config)
    rank = rank_model(folder, config, tied_weights, trust_remote_code=trust_remote_code)
    check_snapshots(rank.model, rank.spec, config)
    cache = KVCache(state_specs(config, rank.spec))
    scores, copies = score_graphs(config, rank.vocab_size), copy_graphs(config, rank.spec)
    with progress.stage("Lowering graphs", len(specs) + len(scores) + len(copies)) as advance:
        called: set[str] = set()
        for number, spec in enumerate(specs):
            ops = rank.ops if like is None else ops_for(config, rank.ops, _most_tokens(like, spec.kind))
            sums = None
            if rank.plan is not None:
                sums = SumsRule(chip_of(config.target), rank.plan.whole, None if split is None else spec.kind in split)
            traced = first if number == 0 else None
            graph = lower_step(rank.model, cache, spec, ops, rank.vocab_size, ranks, rank.columns, sums, traced)
            called |= called_kernels(graph.hlo)
            yield graph
            advance(spec.name)
        for name in config.kernels:
            if name not in called:
                raise ValueError(f"kernels={name!r} computes no layer of this model; leave it out")
        for each in scores:
            yield lower_scores(each, rank.vocab_size, rank.plan)
            advance(each.name)
        for copy in copies:
            yield lower_copy(copy, ranks)
            advance(copy.name)


def _most_tokens(config: NeuronConfig, kind: str) -> int:
    return max(spec.tokens for spec in graph_specs(config) if spec.kind == kind)
