# SPDX-License-Identifier: Apache-2.0
"""The executed part of a model with all that its execution takes: steps, modules, and each rank's weights and history.

The part is the whole model where that is little work, else its first layers with the artifact's own weights: those of each kind
(step/tracing/alike.py) are lowered again, as a model of so many layers with fewer slots and columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ...artifact.artifact import GRAPHS_FOLDER
from ...artifact.quantization import read_formats, write_formats
from ...artifact.skeleton import empty_model, read_config
from ...artifact.weights import named_tensors, rank_weights_name
from ...config import SMALLEST_BLOCK, NeuronConfig
from ...step.model_spec import ModelSpec
from ...step.sampling.buffers import slots_of_rows
from ...step.spec import LOGPROBS, GraphSpec, TensorSpec, graph_specs
from ...step.state_specs import kept_states
from ...step.tracing.alike import kinds_of_layers
from ...targets import CompileJob
from ...targets.neuron.graphs.io import CHOSEN, HLO_SUFFIX, SCORES, read_graph_io, read_hlo
from ...targets.neuron.graphs.state_graphs import copy_graphs, score_graphs, slots_input
from ...targets.neuron.lowering.lower_all import lower_all
from ...targets.neuron.lowering.split_tokens import is_split
from ...targets.neuron.sharding import shard_plan
from .host_ranks import GraphRun, LoweredModule, RankResults, execute_ranks, widen_module
from .recording import RecordedStep, chosen_tokens, drawn_name, record_config, state_history
from .reference import StateParts, places_of, state_parts, take_part


# Products of the linear layers; more would take longer than to lower the graphs.
LARGEST_WORK = 2e10
LARGEST_STATES = 1 << 28  # bytes
_FEWEST_LAYERS, _FEW_SLOTS, _FEW_COLUMNS, _SHORT_CHUNK, _FEW_SNAPSHOTS = 2, 4, 512, 128, 2


@dataclass(frozen=True)
class Trial:
    """A model that is executed."""

    folder: Path  # with its config.json
    config: NeuronConfig  # of its graphs
    artifact_config: NeuronConfig  # decides the form of experts, as in the artifact
    layers: int
    all_layers: int

    @property
    def is_whole(self) -> bool:
        """True where it is the artifact's own model, so that the artifact's own modules are executed."""
        return self.layers == self.all_layers


def choose_trial(job: CompileJob, scratch: Path) -> Trial:
    """Return the whole model, or one of fewer layers with a config.json in `scratch`."""
    folder, config, trusted = job.folder, job.config, job.trust_remote_code
    model = empty_model(folder, config.dtype, trust_remote_code=trusted)
    described = read_config(folder, trust_remote_code=trusted)
    count = int(getattr(described.get_text_config(decoder=True), "num_hidden_layers", 0))
    parameters = sum(tensor.numel() for tensor in named_tensors(model).values())
    tokens = sum(len(step.written) for step in record_config(config, job.model))
    state_bytes = sum(4 * math.prod(each.shape) for each in kept_states(config, job.model))
    whole = Trial(folder, config, config, count, count)
    if parameters * tokens <= LARGEST_WORK and state_bytes <= LARGEST_STATES:
        return whole
    kinds = [kind for kind in kinds_of_layers(model) if len(kind.layers) == count]
    covered = sum(len(kind.members) for kind in kinds) == count
    layers = max(_FEWEST_LAYERS, *(kind.members[0] + 1 for kind in kinds)) if covered else count
    if layers >= count:
        return whole
    small = smaller_config(config)
    _shorten_config(described, layers, count, small.sequence_length)
    described.save_pretrained(scratch)
    for path in folder.glob("*.py"):
        (scratch / path.name).write_bytes(path.read_bytes())
    if formats := read_formats(folder):
        model = empty_model(scratch, "float32", trust_remote_code=trusted)
        names = {name for name, _ in (*model.named_modules(), *model.named_parameters())}
        write_formats({name: each for name, each in formats.items() if name in names}, scratch)
    return Trial(scratch, small, config, layers, count)


def _shorten_config(config: PreTrainedConfig, layers: int, count: int, columns: int) -> None:
    """Keep the first layers. A window that is longer than the columns becomes one that is shorter, so that its edge is tried."""
    text = cast(Any, config.get_text_config(decoder=True))
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == count:
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    window = getattr(text, "sliding_window", None)
    if isinstance(window, int) and window >= columns:
        text.sliding_window = columns // 2


def smaller_config(config: NeuronConfig) -> NeuronConfig:
    """Return few slots, columns and tokens per chunk; every kind of graph stays, and so does an equal split of tokens."""
    ranks = config.tensor_parallel_size
    few = min(config.batch_size, max(_FEW_SLOTS, config.ctx_batch_size))
    slots = few + (config.batch_size - few) % ranks
    length = min(config.sequence_length, max(_FEW_COLUMNS, 2 * slots))
    short = min(config.prefill_chunk_size, _SHORT_CHUNK, (length - slots) // config.ctx_batch_size)
    chunk = short - (short - config.prefill_chunk_size) % ranks
    return replace(
        config,
        batch_size=slots,
        sequence_length=length,
        prefill_chunk_size=chunk if chunk > 0 else short,
        prefill_chunk_buckets=(),
        context_buckets=(length,),
        kv_block_size=None if config.kv_block_size is None else SMALLEST_BLOCK,
        kv_cache_tokens=None,
        state_snapshots=min(config.state_places, _FEW_SNAPSHOTS),
        state_snapshot_interval=None,
    )


@dataclass(frozen=True)
class Setup:
    """A trial that is ready to be executed; `folder` has the weights, `parts` what each rank holds of states."""

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
        """Return the states of the whole model in a type, with the copies that slots keep."""
        return kept_states(replace(self.trial.config, dtype=dtype), self.spec)

    def execute_steps(self, dtype: str, scales: Mapping[str, int]) -> RankResults:
        """Run all steps on all ranks, in the artifact's type, or with widened modules in float32."""
        wide = dtype != self.trial.config.dtype
        modules = {name: widen_module(each) if wide else each for name, each in self.modules.items()}
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


def make_setup(
    folder: Path, trial: Trial, spec: ModelSpec, tied: Mapping[str, str], *, trust_remote_code: bool
) -> Setup:
    """Read an artifact's modules, or lower those of its first layers; raise ValueError where they cannot be lowered or shared."""
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
        kept = replace(spec, states=tuple(each for each in spec.states if each.layer_idx < trial.layers))
        tensors = named_tensors(model)
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


def split_kinds(folder: Path, config: NeuronConfig) -> frozenset[str]:
    """Return the kinds of graphs that split the tokens between ranks in their largest graph."""
    specs = sorted(graph_specs(config), key=lambda spec: spec.tokens)
    largest = {spec.kind: folder / GRAPHS_FOLDER / (spec.name + HLO_SUFFIX) for spec in specs}
    return frozenset(kind for kind, path in largest.items() if is_split(read_hlo(path)))


def to_float32(tensor: Tensor) -> Tensor:
    """Return a weight as a model in float32 has it; codes of 8 bits stay as they are."""
    return tensor.to(torch.float32) if tensor.is_floating_point() and tensor.itemsize > 1 else tensor
