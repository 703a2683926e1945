# SPDX-License-Identifier: Apache-2.0
"""The graphs of an artifact that are no steps: they read or copy what steps leave on the device.

Samplers draw tokens from the logits of a step, and another graph reports log-probabilities. Copies move cached columns from slot to slot,
and the state of a slot as a whole to a place that keeps it, and back.
"""

from __future__ import annotations

from dataclasses import dataclass

from ....config import NeuronConfig
from ....step.model_spec import ModelSpec
from ....step.spec import DECODE, LOGPROBS, TensorSpec, row_counts, sampler_inputs
from ....step.state_specs import BY_TOKEN, kept_state_specs, slot_state_specs, state_specs
from .io import CHOSEN, COPY_SLOT, KEEP_STATE, RESTORE_STATE, SAMPLERS, SCORES


# Which rows a copy takes, and how much of one: tokens, or any number of a row that is copied as a whole; 0 copies nothing.
COPY_INPUTS = tuple(TensorSpec(f"copy.{name}", (1,), "int32") for name in ("source", "destination", "length"))


@dataclass(frozen=True)
class StateGraph:
    """A graph over states. It updates some, and only reads others."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    updated: tuple[TensorSpec, ...]  # rows of copies in the order of `read`; of a sampler the tokens that it chose
    # Sources of a copy, where they are other states than `updated`; else a group's logits.
    read: tuple[TensorSpec, ...] = ()

    @property
    def states(self) -> tuple[TensorSpec, ...]:
        return (*self.read, *self.updated)

    @property
    def group(self) -> str:
        return self.read[0].name.removeprefix(SCORES)


def state_graphs(config: NeuronConfig, model: ModelSpec, vocab_size: int) -> tuple[StateGraph, ...]:
    """Return those of an artifact in the order in which they are lowered; copies for a rank's part of a model have its states."""
    return (*score_graphs(config, vocab_size), *copy_graphs(config, model))


def score_graphs(config: NeuronConfig, vocab_size: int) -> tuple[StateGraph, ...]:
    """Return the graphs over logits; none where the host samples."""
    if not config.on_device_sampling:
        return ()
    columns = -(-vocab_size // config.tensor_parallel_size)
    graphs, scores = [], {}
    for group, count in row_counts(config).items():
        scores[group] = state = TensorSpec(SCORES + group, (count, columns), "float32")
        rows = state.shape[:1]
        inputs = (*sampler_inputs(group, *rows), TensorSpec(slots_input(group), rows, "int32"))
        tokens = TensorSpec(f"{group}.tokens", rows, "int32")
        graphs.append(StateGraph(SAMPLERS[group], inputs, (tokens,), (chosen_state(config),), (state,)))
    if config.top_logprobs is not None and not config.returns_decode_logits:
        # Outputs of `step.sampling.logprobs.Logprobs`; without the most likely tokens where their number is 0.
        rows, most = scores[DECODE].shape[:1], (scores[DECODE].shape[0], config.top_logprobs)
        outputs = [("logprobs", rows, "float32"), ("ranks", rows, "int32")]
        if config.top_logprobs:
            outputs += [("top_tokens", most, "int32"), ("top_logprobs", most, "float32")]
        found = tuple(TensorSpec(f"{DECODE}.{name}", shape, dtype) for name, shape, dtype in outputs)
        chosen = TensorSpec(f"{DECODE}.chosen", rows, "int32")
        graphs.append(StateGraph(LOGPROBS, (chosen,), found, (), (scores[DECODE],)))
    return tuple(graphs)


def copy_graphs(config: NeuronConfig, model: ModelSpec) -> tuple[StateGraph, ...]:
    """Return the graphs that copy rows; none where no prefix can be reused, or no state is to be copied."""
    columns = tuple(each for each in state_specs(config, model) if each.name.startswith(BY_TOKEN))
    graphs = []
    if config.kv_blocks > 1 and columns and (model.reuses_prefixes or config.state_places):
        graphs.append(StateGraph(COPY_SLOT, COPY_INPUTS, (), columns))
    states, places = slot_state_specs(config, model), kept_state_specs(config, model)
    if states and config.state_places:
        graphs.append(StateGraph(KEEP_STATE, COPY_INPUTS, (), places, states))
        graphs.append(StateGraph(RESTORE_STATE, COPY_INPUTS, (), states, places))
    return tuple(graphs)


def chosen_state(config: NeuronConfig) -> TensorSpec:
    return TensorSpec(CHOSEN, (config.batch_size,), "int32")


def slots_input(group: str) -> str:
    """Name the input of a group's sampler that gives each row's slot."""
    return f"{group}.slots"
