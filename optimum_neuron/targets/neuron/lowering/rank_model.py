# SPDX-License-Identifier: Apache-2.0
"""The model as one rank's graphs contain it: its shapes and code, with memory that nothing reads or writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ....artifacts.skeleton import assign, empty_model
from ....artifacts.weights import named_tensors
from ....config import NeuronConfig
from ....graphs.checks.inspect import inspect_model
from ....graphs.ops import StepOps
from ....graphs.spec import ModelSpec
from ..sharding import apply_plan, shard_plan, sharded_ops
from ..sharding.trace import no_data
from .ops import NEURON_OPS


@dataclass(frozen=True)
class RankModel:
    """What all ranks have in common: which rank it is, is one of the weights.

    Attributes:
        model: a rank's part of the model.
        spec: as the rank sees it: with its own number of kv heads.
        ops: the operators of its steps.
        vocab_size: of the whole model.
    """

    model: nn.Module
    spec: ModelSpec
    ops: StepOps
    vocab_size: int


def rank_model(
    folder: Path, config: NeuronConfig, tied_weights: Mapping[str, str], *, trust_remote_code: bool
) -> RankModel:
    """Builds a rank's part of the model of a folder's config.json, with uninitialized weights.

    Memory that nobody touches costs nothing, so this takes no more than the model's code, whatever its size.

    Raises:
        ValueError: the model cannot be shared by `config.tensor_parallel_size` ranks.
    """
    model = cast(PreTrainedModel, empty_model(folder, config.dtype, trust_remote_code=trust_remote_code))
    ops, plan = NEURON_OPS, None
    if config.tensor_parallel_size > 1:
        plan = shard_plan(model, config.tensor_parallel_size)
        apply_plan(model, plan)
        ops = sharded_ops(ops, model, plan)
    with no_data():
        _assign_memory(model, tied_weights)
        spec = inspect_model(model)
    _assign_memory(model, tied_weights)
    return RankModel(model, spec, ops, spec.vocab_size if plan is None else plan.vocab_size)


def _assign_memory(model: nn.Module, tied_weights: Mapping[str, str]) -> None:
    expected = named_tensors(model)
    foreign = next((name for pair in tied_weights.items() for name in pair if name not in expected), None)
    if foreign is not None:
        raise ValueError(
            f"weights are tied to {foreign}, which the model of config.json lacks; export the model again"
        )
    tensors: dict[str, Tensor] = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in expected.items()
    }
    assign(model, tensors | {alias: tensors[stored] for alias, stored in tied_weights.items()})
