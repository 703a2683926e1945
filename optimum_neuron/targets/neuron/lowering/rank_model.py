# SPDX-License-Identifier: Apache-2.0
"""The model as one rank's graphs contain it: its shapes and code, with memory that nothing reads or writes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from transformers import PreTrainedModel

from ....artifact.pages import never_filled
from ....artifact.skeleton import assign, empty_model
from ....artifact.weights import named_tensors
from ....config import NeuronConfig
from ....parity.inspect import inspect_model
from ....step.kv_cache import KVCache
from ....step.model_spec import ModelSpec
from ....step.ops import StepOps
from ....step.program import export_layers_once
from ....step.sampling.scores import Scores
from ....step.spec import graph_specs
from ....step.state_specs import state_specs
from ..kernels.registry import with_kernels
from ..sharding import ShardPlan, apply_plan, shard_plan, sharded_ops, tied_names
from ..sharding.trace import no_data
from ..weight_layout import WeightLayout
from .decompositions import decompose
from .ops import NEURON_OPS, ops_for
from .weight_uses import weight_layout


@dataclass(frozen=True)
class RankModel:
    """What all ranks have in common: which rank it is, is one of the weights.

    Attributes:
        model: a rank's part of the model.
        spec: as the rank sees it: with its own number of kv heads.
        ops: the operators of its steps.
        vocab_size: of the whole model.
        plan: how ranks share it; None for a single one.
    """

    model: nn.Module
    spec: ModelSpec
    ops: StepOps
    vocab_size: int
    plan: ShardPlan | None

    @property
    def columns(self) -> int:
        """Of a rank's logits."""
        return self.vocab_size if self.plan is None else self.plan.local_vocab_size


def rank_model(
    folder: Path, config: NeuronConfig, tied_weights: Mapping[str, str], *, trust_remote_code: bool
) -> RankModel:
    """Builds a rank's part of the model of a folder's config.json, with uninitialized weights.

    Memory that nobody touches costs nothing, so this takes no more than the model's code, whatever its size.

    Raises:
        ValueError: the model cannot be shared by `config.tensor_parallel_size` ranks.
    """
    model = cast(PreTrainedModel, empty_model(folder, config.dtype, trust_remote_code=trust_remote_code))
    plan = None if config.tensor_parallel_size == 1 else shard_plan(model, config.tensor_parallel_size)
    return _as_rank(model, plan, tied_weights, config)


@dataclass(frozen=True)
class FirstGraph:
    """The first graph of a model, traced to see how its weights are stored; lowering goes on with it.

    Attributes:
        program: decomposed; to be lowered once, which changes it.
        layout: how it takes the weights, of which all other graphs take what they take, too.
    """

    program: ExportedProgram
    layout: WeightLayout


def trace_first(model: PreTrainedModel, plan: ShardPlan, config: NeuronConfig) -> FirstGraph:
    """Traces the first graph of a model that is exported.

    Args:
        model: is neither read nor changed.
        plan: of one rank, too.
    """
    empty = _empty_copy(model)
    tied = tied_names(named_tensors(model), plan)
    rank = _as_rank(empty, plan if plan.world_size > 1 else None, tied, config)
    cache = KVCache(state_specs(config, rank.spec))
    step = graph_specs(config)[0]
    program = export_layers_once(rank.model, cache, step, rank.ops, Scores.of(step, rank.columns), decompose)
    return FirstGraph(program, weight_layout(program))


def _empty_copy(model: PreTrainedModel) -> PreTrainedModel:
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(model, memo)


def _as_rank(
    model: PreTrainedModel, plan: ShardPlan | None, tied_weights: Mapping[str, str], config: NeuronConfig
) -> RankModel:
    ops = ops_for(config, with_kernels(NEURON_OPS, config.kernels))
    if plan is not None:
        apply_plan(model, plan, float32_reduce=config.float32_reduce)
        ops = sharded_ops(ops, model, plan)
    with no_data():
        _assign_memory(model, tied_weights)
        spec = inspect_model(model)
    _assign_memory(model, tied_weights)
    return RankModel(model, spec, ops, spec.vocab_size if plan is None else plan.vocab_size, plan)


def _assign_memory(model: nn.Module, tied_weights: Mapping[str, str]) -> None:
    expected = named_tensors(model)
    foreign = next((name for pair in tied_weights.items() for name in pair if name not in expected), None)
    if foreign is not None:
        raise ValueError(
            f"weights are tied to {foreign}, which the model of config.json lacks; export the model again"
        )
    tensors: dict[str, Tensor] = {
        name: never_filled(tuple(tensor.shape), tensor.dtype) for name, tensor in expected.items()
    }
    assign(model, tensors | {alias: tensors[stored] for alias, stored in tied_weights.items()})
