# SPDX-License-Identifier: Apache-2.0
"""Lowering of all graphs of an artifact, or of a model before its export, from the config alone."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from torch import nn
from torch.export import ExportedProgram
from transformers import PreTrainedModel

from .... import progress
from ....artifact.pages import never_filled
from ....artifact.quantization import write_formats
from ....artifact.skeleton import assign, empty_model
from ....artifact.weights import named_tensors
from ....checkpoints.find import find_checkpoint
from ....checkpoints.quantize.quantize import formats_of
from ....config import NeuronConfig
from ....parity.inspect import inspect_model
from ....step.attention.kv_cache import KVCache
from ....step.model_spec import ModelSpec
from ....step.ops import StepOps
from ....step.program import export_layers_once
from ....step.sampling.buffers import Scores
from ....step.spec import graph_specs
from ....step.state_specs import state_specs
from ..graphs.io import LoweredGraph
from ..graphs.state_graphs import state_graphs
from ..kernels.attention import ATTENTION_CTE, attend_chunks
from ..sdk.devices import resolve_lowered_target
from ..sdk.hardware import check_parallel_size, chip_of
from ..sdk.stacks import check_lowering
from ..sharding import ShardPlan, apply_plan, shard_plan, sharded_ops, tied_names
from ..sharding.trace import empty_copy, no_data
from ..sharding.weights import WeightLayout
from .decompositions import decompose
from .kernel_calls import called_kernels
from .lower import lower_state_graph, lower_step
from .ops import NEURON_OPS, ops_for
from .probe import Collective, find_trials, lower_probe
from .split_tokens import SumsRule
from .weight_uses import weight_layout


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
    """Yield all graphs of a config as they are lowered: steps, then the graphs over states.

    Args:
        folder: holds the model's config.json, and its modeling code where that is trusted.
        tied_weights: alias to stored name; without it, tied weights become inputs of their own.
        like: a config with the largest graph of each kind, which decides the form of experts; None: each graph decides for itself.
        split: kinds of graphs with split tokens; None: each graph splits them where it takes less time.
        first: the result of `trace_first` for this model and config, where there is one; it is changed.

    Raises:
        ValueError: the model cannot be lowered, or shared by so many ranks; or kernels, or places that keep state, have no use in it.
    """
    ranks, specs = config.tensor_parallel_size, graph_specs(config)
    rank = rank_model(folder, config, tied_weights, trust_remote_code=trust_remote_code)
    rank.spec.check_kept_states(type(rank.model).__name__, config)
    cache = KVCache(state_specs(config, rank.spec))
    others = state_graphs(config, rank.spec, rank.vocab_size)
    with progress.stage("Lowering graphs", len(specs) + len(others)) as advance:
        called, trials = set[str](), set[Collective]()
        for number, spec in enumerate(specs):
            ops, sums, traced = rank.ops, None, first if number == 0 else None
            if like is not None:
                ops = ops_for(config, ops, max(each.tokens for each in graph_specs(like) if each.kind == spec.kind))
            if rank.plan is not None:
                sums = SumsRule(chip_of(config.target), rank.plan.whole, None if split is None else spec.kind in split)
            graph = lower_step(rank.model, cache, spec, ops, rank.vocab_size, ranks, rank.columns, sums, traced)
            called |= called_kernels(graph.hlo)
            trials |= find_trials(graph.hlo)
            yield graph
            advance(spec.name)
        for name in config.kernels:
            if name not in called:
                raise ValueError(f"kernels={name!r} computes no layer of this model; leave it out")
        for each in others:
            graph = lower_state_graph(each, rank.vocab_size, rank.plan, ranks)
            trials |= find_trials(graph.hlo)
            yield graph
            advance(each.name)
        if trials:
            yield lower_probe(trials, ranks)


def model_graphs(
    model: str | Path,
    config: NeuronConfig,
    *,
    revision: str | None = None,
    token: str | None = None,
    trust_remote_code: bool = False,
) -> Iterator[LoweredGraph]:
    """Yield all graphs that an export of a model would compile, as they are lowered.

    Args:
        model: a Hub id, a checkpoint folder, or a .gguf file. Only the config is downloaded.

    Raises:
        ValueError: the model or the sizes cannot be exported, or "auto" finds no Neuron device.
        FileNotFoundError: there is no such model.
        RuntimeError: this machine cannot lower graphs.
    """
    # Sizes follow from the target that "auto" stands for.
    config = dataclasses.replace(config, target=resolve_lowered_target(config.target))
    check_parallel_size(config.target, config.tensor_parallel_size)
    check_lowering()
    checkpoint = find_checkpoint(
        model, revision=revision, token=token, trust_remote_code=trust_remote_code, weights=False
    )
    model_config = checkpoint.load_config()
    checkpoint.check_length(model_config, config.sequence_length)
    config = dataclasses.replace(config, dtype=checkpoint.resolve_dtype(model_config, config.dtype) or "float32")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model_config.save_pretrained(folder)
        if trust_remote_code:
            for path in checkpoint.folder.glob("*.py"):
                shutil.copyfile(path, folder / path.name)
        plain = empty_model(folder, config.dtype, trust_remote_code=trust_remote_code)
        write_formats(formats_of(cast(PreTrainedModel, plain), config), folder)
        yield from lower_all(folder, config, {}, trust_remote_code=trust_remote_code)


@dataclass(frozen=True)
class RankModel:
    """A rank's part of a model, the same for all ranks: the rank itself is one of the weights."""

    model: nn.Module
    spec: ModelSpec  # as the rank sees it: with its own number of kv heads
    ops: StepOps  # the operators of its steps
    vocab_size: int  # of the whole model
    plan: ShardPlan | None  # how ranks share it; None for a single one

    @property
    def columns(self) -> int:
        return self.vocab_size if self.plan is None else self.plan.local_vocab_size


def rank_model(
    folder: Path, config: NeuronConfig, tied_weights: Mapping[str, str], *, trust_remote_code: bool
) -> RankModel:
    """Build a rank's part of the model of a folder's config.json, in memory that nothing touches, or refuse it with a ValueError."""
    model = cast(PreTrainedModel, empty_model(folder, config.dtype, trust_remote_code=trust_remote_code))
    plan = None if config.tensor_parallel_size == 1 else shard_plan(model, config.tensor_parallel_size)
    return _as_rank(model, plan, tied_weights, config)


def trace_first(
    model: PreTrainedModel, plan: ShardPlan, config: NeuronConfig
) -> tuple[ExportedProgram | None, WeightLayout]:
    """Trace the first graph of a model, which is neither read nor changed; `plan` is that of one rank, too.

    Return the decomposed program, to be lowered once, which changes it; and how it, and so all other graphs, take the weights.
    """
    tied = tied_names(named_tensors(model), plan)
    rank = _as_rank(empty_copy(model, "meta"), plan if plan.world_size > 1 else None, tied, config)
    cache = KVCache(state_specs(config, rank.spec))
    step = graph_specs(config)[0]
    program = export_layers_once(rank.model, cache, step, rank.ops, Scores.for_graph(step, rank.columns), decompose)
    return program, weight_layout(program)


def _as_rank(
    model: PreTrainedModel, plan: ShardPlan | None, tied_weights: Mapping[str, str], config: NeuronConfig
) -> RankModel:
    ops = ops_for(config, NEURON_OPS)
    if ATTENTION_CTE.name in config.kernels:
        ops = dataclasses.replace(ops, attend_cache=attend_chunks(ops.attend_cache))
    if plan is not None:
        apply_plan(model, plan, float32_reduce=config.float32_reduce)
        ops = sharded_ops(ops, plan)
    with no_data():
        _assign_memory(model, tied_weights)
        spec = inspect_model(model)
    _assign_memory(model, tied_weights)
    return RankModel(model, spec, ops, spec.vocab_size if plan is None else plan.vocab_size, plan)


def _assign_memory(model: nn.Module, tied_weights: Mapping[str, str]) -> None:
    expected = named_tensors(model)
    foreign = next((name for pair in tied_weights.items() for name in pair if name not in expected), None)
    if foreign is not None:
        raise ValueError(f"weights are tied to {foreign}, which the model of config.json lacks; export it again")
    tensors = {name: never_filled(tuple(tensor.shape), tensor.dtype) for name, tensor in expected.items()}
    assign(model, tensors | {alias: tensors[stored] for alias, stored in tied_weights.items()})
