# SPDX-License-Identifier: Apache-2.0
"""A trial with all that its execution takes, from an artifact's folder: steps, modules, and each rank's weights and history."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import cast

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from ...artifact.artifact import GRAPHS_FOLDER
from ...artifact.skeleton import empty_model
from ...artifact.weights import named_tensors, rank_weights_name
from ...config import NeuronConfig
from ...step.model_spec import ModelSpec
from ...step.sampling.buffers import slots_of_rows
from ...step.spec import LOGPROBS, GraphSpec, TensorSpec, graph_specs
from ...step.state_specs import state_specs
from ...targets.neuron.graphs.io import CHOSEN, HLO_SUFFIX, SCORES, read_graph_io, read_hlo
from ...targets.neuron.graphs.state_graphs import copy_graphs, score_graphs, slots_input, snapshot_states
from ...targets.neuron.lowering.lower_all import lower_all
from ...targets.neuron.lowering.split_tokens import is_split
from ...targets.neuron.sharding import shard_plan
from .host_ranks import GraphRun, LoweredModule, RankResults, execute_ranks
from .parts import StateParts, places_of, state_parts, take_part
from .recording import RecordedStep, chosen_tokens, drawn_name, record_steps, state_history
from .trial import Trial
from .widened import widen_module


@dataclass(frozen=True)
class Setup:
    """A trial that is ready to be executed.

    Attributes:
        folder: folder with the artifact's weights.
        tied: alias to stored name.
        parts: heads and channels of each rank; None for a single rank.
    """

    folder: Path
    trial: Trial
    spec: ModelSpec
    tied: Mapping[str, str]
    modules: Mapping[str, LoweredModule]
    steps: tuple[RecordedStep, ...]
    parts: StateParts | None

    @property
    def ranks(self) -> int:
        return self.trial.config.tensor_parallel_size

    @property
    def graphs(self) -> tuple[GraphSpec, ...]:
        return graph_specs(self.trial.config)

    def state_specs(self, dtype: str) -> tuple[TensorSpec, ...]:
        """Return the states of the whole model in a type, with snapshots of them."""
        config = dataclasses.replace(self.trial.config, dtype=dtype)
        return (*state_specs(config, self.spec), *snapshot_states(config, self.spec))

    def execute_steps(self, dtype: str, scales: Mapping[str, int]) -> RankResults:
        """Run all steps on all ranks, in the artifact's type, or with widened modules in float32."""
        wide = dtype != self.trial.config.dtype
        modules = {name: LoweredModule(*widen_module(*each)) if wide else each for name, each in self.modules.items()}
        whole = dict(state_history(self.state_specs(dtype), scales))
        tensors = [chain(self._weights(rank, wide=wide), self._states(rank, whole)) for rank in range(self.ranks)]
        runs = [list(self._graph_runs(step)) for step in self.steps]
        found = execute_ranks(modules, tensors, [run for each in runs for run in each])
        return [_group_by_step(results, [len(each) for each in runs]) for results in found]

    def _states(self, rank: int, whole: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield a rank's states, and zeros for what steps leave to samplers and to the next step."""
        for name, state in whole.items():
            yield name, take_part(state, places_of(self.parts, name, rank))
        inputs = (each for module in self.modules.values() for each in module.io.inputs if each.role == "state")
        for left in {each.name: each for each in inputs if each.name.startswith((SCORES, CHOSEN))}.values():
            yield left.name, torch.zeros(left.shape, dtype=getattr(torch, left.dtype))

    def _graph_runs(self, step: RecordedStep) -> Iterator[GraphRun]:
        """Yield a step, and every graph over its logits that may follow it."""
        yield GraphRun(step.graph, step.graph_inputs(), {} if step.kept is None else {CHOSEN: step.kept})
        for graph in score_graphs(self.trial.config, self.spec.vocab_size):
            if graph.name == LOGPROBS and f"{graph.group}.position_ids" in step.inputs:
                yield GraphRun(graph.name, {graph.inputs[0].name: chosen_tokens(step)})
            elif graph.inputs[0].name in step.inputs:
                positions, slots = (step.inputs.get(f"{graph.group}.{name}") for name in ("position_ids", "seq_ids"))
                assert positions is not None
                known = {**step.inputs, slots_input(graph.group): slots_of_rows(positions, slots)}
                yield GraphRun(graph.name, {each.name: known[each.name] for each in graph.inputs})

    def _weights(self, rank: int, *, wide: bool) -> Iterator[tuple[str, Tensor]]:
        needed = {name for module in self.modules.values() for name in module.io.names("weight")}
        with safe_open(self.folder / rank_weights_name(rank, self.ranks), framework="pt") as file:
            for name in sorted(needed):
                tensor = file.get_tensor(self.tied.get(name, name))
                yield name, to_float32(tensor) if wide else tensor


def _group_by_step(results: list[dict[str, Tensor]], counts: Sequence[int]) -> list[dict[str, Tensor]]:
    """Return the outputs of each step's runs, samplers under names of their own; and last, the states."""
    rest = iter(results)
    steps = []
    for count in counts:
        found = dict(next(rest))
        for _ in range(count - 1):
            for name, each in next(rest).items():
                columns = each.unbind(1) if name.endswith(".top_tokens") else ()
                found |= {drawn_name(name): each} | {f"{name}.{place}": one for place, one in enumerate(columns)}
        steps.append(found)
    return [*steps, next(rest)]


def record_config(config: NeuronConfig, spec: ModelSpec) -> tuple[RecordedStep, ...]:
    """Return the steps that are executed at a config's sizes."""
    ids = min(spec.num_embeddings, spec.vocab_size)
    copies = {graph.name for graph in copy_graphs(config, spec)}
    return record_steps(graph_specs(config), ids, copies, config.snapshot_places)


def make_setup(
    folder: Path, trial: Trial, spec: ModelSpec, tied: Mapping[str, str], *, trust_remote_code: bool
) -> Setup:
    """Read an artifact's modules, or lower those of its first layers.

    Args:
        folder: the artifact, or the folder that becomes it, with graphs and weights.
        spec: spec of the artifact's whole model.

    Raises:
        ValueError: the first layers cannot be lowered, or not be shared by so many ranks.
    """
    config = trial.config
    model = empty_model(trial.folder, config.dtype, trust_remote_code=trust_remote_code)
    if trial.is_whole:
        kept = spec
        names = [each.name for each in graph_specs(config)]
        names += [each.name for each in score_graphs(config, spec.vocab_size)]
        names += [each.name for each in copy_graphs(config, spec)]
        paths = {name: folder / GRAPHS_FOLDER / (name + HLO_SUFFIX) for name in names}
        modules = {name: LoweredModule(read_hlo(path), read_graph_io(path)) for name, path in paths.items()}
    else:
        kept, tensors = _first_layers(spec, trial.layers), named_tensors(model)
        tied = {alias: stored for alias, stored in tied.items() if alias in tensors and stored in tensors}
        lowered = lower_all(
            trial.folder,
            config,
            tied,
            trust_remote_code=trust_remote_code,
            like=trial.artifact_config,
            split=split_kinds(folder, trial.artifact_config),
        )
        modules = {graph.name: LoweredModule(graph.hlo, graph.io) for graph in lowered}
    parts = None
    if config.tensor_parallel_size > 1:
        parts = state_parts(shard_plan(cast(PreTrainedModel, model), config.tensor_parallel_size), kept, model)
    return Setup(folder, trial, kept, tied, modules, record_config(config, kept), parts)


def _first_layers(spec: ModelSpec, layers: int) -> ModelSpec:
    """Return the spec of a model's first layers."""
    return dataclasses.replace(spec, states=tuple(each for each in spec.states if each.layer_idx < layers))


def split_kinds(folder: Path, config: NeuronConfig) -> frozenset[str]:
    """Return the kinds of graphs that split the tokens between ranks in their largest graph."""
    specs = sorted(graph_specs(config), key=lambda spec: spec.tokens)
    largest = {spec.kind: folder / GRAPHS_FOLDER / (spec.name + HLO_SUFFIX) for spec in specs}
    return frozenset(kind for kind, path in largest.items() if is_split(read_hlo(path)))


def to_float32(tensor: Tensor) -> Tensor:
    """Return a weight as a model in float32 has it; codes of 8 bits stay as they are."""
    return tensor.to(torch.float32) if tensor.is_floating_point() and tensor.itemsize > 1 else tensor
