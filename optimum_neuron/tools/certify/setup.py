# SPDX-License-Identifier: Apache-2.0
"""What is executed, from an artifact's folder: steps, modules, and each rank's weights and history."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from ...artifact.artifact import GRAPHS_FOLDER
from ...artifact.skeleton import empty_model
from ...artifact.weights import rank_weights_name
from ...config import NeuronConfig
from ...step.model_spec import ModelSpec
from ...step.sampling.chosen import slots_of_rows
from ...step.spec import LOGPROBS, GraphSpec, TensorSpec, graph_specs
from ...step.state_specs import state_specs
from ...targets.neuron.copy_graphs import copy_graphs, snapshot_states
from ...targets.neuron.graph_files import HLO_SUFFIX, read_graph_io, read_hlo
from ...targets.neuron.graph_io import CHOSEN, SCORES, InputBinding
from ...targets.neuron.lowering.lower_all import lower_all
from ...targets.neuron.lowering.split_tokens import is_split
from ...targets.neuron.score_graphs import score_graphs, slots_input
from ...targets.neuron.sharding import shard_plan
from .host_ranks import Found, Given, Module, execute
from .parts import StateParts, part, places_of, state_parts
from .recording import Step, chosen_tokens, drawn, history, record_steps
from .trial import Trial, tied_in
from .widened import widen


@dataclass(frozen=True)
class Setup:
    """A trial, ready to be executed.

    Attributes:
        folder: with the artifact's weights.
        tied: alias to stored name.
        parts: which heads and channels ranks hold; None for a single rank.
    """

    folder: Path
    trial: Trial
    spec: ModelSpec
    tied: Mapping[str, str]
    modules: Mapping[str, Module]
    steps: tuple[Step, ...]
    parts: StateParts | None

    @property
    def ranks(self) -> int:
        return self.trial.config.tensor_parallel_size

    @property
    def graphs(self) -> tuple[GraphSpec, ...]:
        return graph_specs(self.trial.config)

    def states(self, dtype: str) -> tuple[TensorSpec, ...]:
        """Of the whole model, in a type of their own, with snapshots of them."""
        config = dataclasses.replace(self.trial.config, dtype=dtype)
        return (*state_specs(config, self.spec), *snapshot_states(config, self.spec))

    def execute(self, dtype: str, scales: Mapping[str, int]) -> Found:
        """Runs all steps on all ranks.

        Args:
            dtype: the artifact's, or float32 for modules that are widened.
        """
        wide = dtype != self.trial.config.dtype
        modules = {name: Module(*widen(*each)) if wide else each for name, each in self.modules.items()}
        whole = dict(history(self.states(dtype), scales))
        tensors = [chain(self._weights(rank, wide=wide), self._held(rank, whole)) for rank in range(self.ranks)]
        runs = [list(self._runs(step)) for step in self.steps]
        found = execute(modules, tensors, [run for each in runs for run in each])
        return [_by_step(results, [len(each) for each in runs]) for results in found]

    def _held(self, rank: int, states: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for name, state in states.items():
            yield name, part(state, places_of(self.parts, name, rank))
        for left in self._left().values():
            yield left.name, torch.zeros(left.shape, dtype=getattr(torch, left.dtype))

    def _left(self) -> dict[str, InputBinding]:
        """What steps leave for samplers and for the next step, by name."""
        states = (each for module in self.modules.values() for each in module.io.inputs if each.role == "state")
        return {each.name: each for each in states if each.name.startswith((SCORES, CHOSEN))}

    def _runs(self, step: Step) -> Iterator[Given]:
        """A step, and every graph over its logits that may follow it."""
        yield Given(step.graph, step.given(), {} if step.kept is None else {CHOSEN: step.kept})
        for graph in score_graphs(self.trial.config, self.spec.vocab_size):
            if graph.name == LOGPROBS and f"{graph.group}.position_ids" in step.inputs:
                yield Given(graph.name, {graph.inputs[0].name: chosen_tokens(step)})
            elif graph.inputs[0].name in step.inputs:
                positions, slots = (step.inputs.get(f"{graph.group}.{name}") for name in ("position_ids", "seq_ids"))
                assert positions is not None
                known = {**step.inputs, slots_input(graph.group): slots_of_rows(positions, slots)}
                yield Given(graph.name, {each.name: known[each.name] for each in graph.inputs})

    def _weights(self, rank: int, *, wide: bool) -> Iterator[tuple[str, Tensor]]:
        needed = {name for module in self.modules.values() for name in module.io.names("weight")}
        with safe_open(self.folder / rank_weights_name(rank, self.ranks), framework="pt") as file:
            for name in sorted(needed):
                tensor = file.get_tensor(self.tied.get(name, name))
                yield name, in_float32(tensor) if wide else tensor


def _by_step(results: list[dict[str, Tensor]], counts: Sequence[int]) -> list[dict[str, Tensor]]:
    """What each step's runs returned, samplers under names of their own; and last, the states."""
    rest = iter(results)
    steps = []
    for count in counts:
        found = dict(next(rest))
        for _ in range(count - 1):
            for name, each in next(rest).items():
                columns = each.unbind(1) if name.endswith(".top_tokens") else ()
                found |= {drawn(name): each} | {f"{name}.{place}": column for place, column in enumerate(columns)}
        steps.append(found)
    return [*steps, next(rest)]


def steps_of(config: NeuronConfig, spec: ModelSpec) -> tuple[Step, ...]:
    """The steps that are executed at a config's sizes."""
    ids = min(spec.num_embeddings, spec.vocab_size)
    copies = {graph.name for graph in copy_graphs(config, spec)}
    return record_steps(graph_specs(config), ids, copies, config.snapshot_places)


def make_setup(
    folder: Path, trial: Trial, spec: ModelSpec, tied: Mapping[str, str], *, trust_remote_code: bool
) -> Setup:
    """Reads an artifact's modules, or lowers those of its first layers.

    Args:
        folder: of the artifact, or one that becomes it: with its graphs and weights.
        spec: of the artifact's whole model.

    Raises:
        ValueError: the first layers cannot be lowered, or not be shared by so many ranks.
    """
    config = trial.config
    if trial.whole:
        few, names = spec, [each.name for each in graph_specs(config)]
        names += [graph.name for graph in score_graphs(config, spec.vocab_size)]
        names += [graph.name for graph in copy_graphs(config, spec)]
        paths = {name: folder / GRAPHS_FOLDER / (name + HLO_SUFFIX) for name in names}
        modules = {name: Module(read_hlo(path), read_graph_io(path)) for name, path in paths.items()}
    else:
        few = first_layers(spec, trial.layers)
        tied = tied_in(tied, trial.folder, config, trust_remote_code=trust_remote_code)
        lowered = lower_all(
            trial.folder,
            config,
            tied,
            trust_remote_code=trust_remote_code,
            like=trial.artifact_config,
            split=split_kinds(folder, trial.artifact_config),
        )
        modules = {graph.name: Module(graph.hlo, graph.io) for graph in lowered}
    parts = None
    if config.tensor_parallel_size > 1:
        model = empty_model(trial.folder, config.dtype, trust_remote_code=trust_remote_code)
        parts = state_parts(shard_plan(cast(PreTrainedModel, model), config.tensor_parallel_size), few, model)
    return Setup(folder, trial, few, tied, modules, steps_of(config, few), parts)


def first_layers(spec: ModelSpec, layers: int) -> ModelSpec:
    """What the graphs of a model's first layers keep."""
    kinds = ("layers", "convolutions", "recurrences", "selections", "compressions")
    kept: dict[str, Any] = {
        kind: tuple(each for each in getattr(spec, kind) if each.layer_idx < layers) for kind in kinds
    }
    return dataclasses.replace(spec, **kept)


def split_kinds(folder: Path, config: NeuronConfig) -> frozenset[str]:
    """Kinds of an artifact's graphs in whose largest one ranks have parts of the tokens."""
    specs = sorted(graph_specs(config), key=lambda spec: spec.tokens)
    largest = {spec.kind: folder / GRAPHS_FOLDER / (spec.name + HLO_SUFFIX) for spec in specs}
    return frozenset(kind for kind, path in largest.items() if is_split(read_hlo(path)))


def in_float32(tensor: Tensor) -> Tensor:
    """A weight as a model in float32 has it; codes of 8 bits stay what they are."""
    return tensor.to(torch.float32) if tensor.is_floating_point() and tensor.itemsize > 1 else tensor
