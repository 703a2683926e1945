# SPDX-License-Identifier: Apache-2.0
"""Recorded steps, run by the eager target: their results, and the tokens that rounding may choose."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...arrays import to_numpy, to_torch
from ...parity.conditions import shaken
from ...step.attention.kv_cache import KVCache
from ...step.model_spec import ModelSpec
from ...step.ops import EAGER_OPS
from ...step.spec import GraphSpec, SamplingParams, TensorSpec
from ...step.state_specs import BY_TOKEN
from ...step.step import StepModule
from ...targets.eager import EagerExecutable
from ...targets.neuron.graphs.io import CACHE, COPIES, COPY_SLOT, KEEP_STATE, SNAPSHOTS
from .code_steps import write_moved
from .random_blocks import gathered_spec
from .recording import RecordedStep, drawn_name, state_history


_TEMPERATURE = SamplingParams._fields.index("temperature")
# Tried places of a uniform number, in parts of how far rounding moves it.
_PLACES = (-1.0, -0.75, -0.5, -0.25, 0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class SamplerCall:
    """A call of the sampler: logits `[rows, vocab]`, and its other arguments."""

    logits: Tensor
    others: tuple[Any, ...]

    def at_temperature_0(self) -> SamplerCall:
        """Return the same call with greedy rows."""
        params, *rest = self.others
        return SamplerCall(self.logits, (torch.zeros_like(params), *rest))

    def accepted_tokens(self, row: int, bound: float) -> tuple[int, ...]:
        """Return the tokens that a row's sampler may choose where each logit is off by up to `bound`.

        A greedy row may choose every token that is so near to the largest. A sampled row may choose what its uniform
        number finds when it moves by as much as such logits move a probability.
        """
        params, uniforms, *rest = self.others
        logits, own = self.logits[row : row + 1], params[row : row + 1]
        temperature = float(own[0, _TEMPERATURE])
        if temperature == 0:
            near = (logits[0] >= logits[0].max() - 2 * bound).nonzero().flatten()
            return tuple(near.tolist())
        shift = min(4 * bound / temperature, 1.0)
        places = (uniforms[row : row + 1] + shift * torch.tensor(_PLACES)).clamp(0, 1 - 2**-24)
        drawn = [int(EAGER_OPS.sample(logits, own, place[None], *rest)) for place in places]
        return tuple(sorted(set(drawn)))


@dataclass(frozen=True)
class ReferenceRun:
    """Results of recorded steps.

    Attributes:
        logits: by number of the step and name of the output, `[rows, vocab]`.
        choices: the same of the outputs that are tokens.
        states: at the end, by name; snapshots are among them.
        trash: by name of a state, the number of its last rows that take padding.
    """

    logits: dict[tuple[int, str], Tensor]
    choices: dict[tuple[int, str], SamplerCall]
    states: dict[str, Tensor]
    trash: dict[str, int]


@torch.no_grad()
def run_reference(
    model: torch.nn.Module,
    states: Sequence[TensorSpec],
    graphs: Sequence[GraphSpec],
    spec: ModelSpec,
    steps: Sequence[RecordedStep],
    scales: Mapping[str, int],
    *,
    shake: bool = False,
) -> ReferenceRun:
    """Run the eager target over a history of its own.

    Args:
        states: all states, with snapshots of them.
        shake: move each module's results by a unit in their last place, and one code of each head of coded keys and values.
    """
    cache = KVCache(each for each in states if each.name.startswith(CACHE))
    places = [each for each in states if each.name.startswith(SNAPSHOTS)]
    snapshots = {each.name: torch.zeros(each.shape, dtype=getattr(torch, each.dtype)) for each in places}
    calls: list[SamplerCall] = []

    def sample(logits: Tensor, *others: Any) -> Tensor:
        calls.append(SamplerCall(logits.clone(), others))
        return EAGER_OPS.sample(logits, *others)

    ops = replace(EAGER_OPS, sample=sample, write_cache=write_moved if shake else EAGER_OPS.write_cache)
    modules = {each.name: StepModule(model, cache, gathered_spec(each), ops).eval() for each in graphs}
    executable = EagerExecutable(
        modules, cache, {name.removeprefix(SNAPSHOTS): to_numpy(each) for name, each in snapshots.items()}
    )
    for name, state in state_history(states, scales):
        if name in snapshots:
            snapshots[name].copy_(state)
        else:
            executable.write_state(name, to_numpy(state))
    logits: dict[tuple[int, str], Tensor] = {}
    choices: dict[tuple[int, str], SamplerCall] = {}
    with shaken(model, 0) if shake else nullcontext():
        for number, step in enumerate(steps):
            if step.graph in COPIES:
                _run_copy(executable, step)
                continue
            calls.clear()
            given = step.inputs if step.by_table is None else step.by_table
            results = executable.run(step.graph, [to_numpy(each) for each in given.values()])
            sampled = iter(calls)
            for output, result in zip(modules[step.graph].spec.outputs(spec.vocab_size), results, strict=True):
                if output.name.endswith(".tokens"):
                    # The step chooses the largest of each row, and a sampler of its own draws.
                    choice = next(sampled)
                    choices[number, output.name] = choice.at_temperature_0()
                    choices[number, drawn_name(output.name)] = choice
                else:
                    logits[number, output.name] = to_torch(result).clone()
    read = {each.name: to_torch(executable.read_state(each.name)) for each in states if each.name not in snapshots}
    return ReferenceRun(
        logits, choices, snapshots | read, {each.name: _trash_rows(each, graphs[0]) for each in states}
    )


def _run_copy(executable: EagerExecutable, step: RecordedStep) -> None:
    source, destination, length = (int(each) for each in step.inputs.values())
    if step.graph == COPY_SLOT:
        executable.copy_slot(source, destination, length)
    elif length and step.graph == KEEP_STATE:
        executable.keep_state(source, destination)
    elif length:
        executable.restore_state(source, destination)


def _trash_rows(state: TensorSpec, graph: GraphSpec) -> int:
    """Return the number of a state's last blocks or rows that no row may have; snapshots have none."""
    if state.name.startswith(SNAPSHOTS):
        return 0
    has_blocks = graph.kv_block_size is not None and state.name.startswith(BY_TOKEN)
    return state.shape[0] - (graph.kv_blocks if has_blocks else graph.batch_size)


@torch.no_grad()
def state_scales(
    model: torch.nn.Module,
    states: Sequence[TensorSpec],
    graphs: Sequence[GraphSpec],
    spec: ModelSpec,
    steps: Sequence[RecordedStep],
) -> dict[str, int]:
    """Return for each state the power of two that is about the largest number that this model writes."""
    first = next(step for step in steps if step.graph not in COPIES)
    nothing = {each.name: -126 for each in states}
    found = run_reference(model, states, graphs, spec, [first], nothing)
    live = {name: state[: len(state) - found.trash[name]].float() for name, state in found.states.items()}
    largest = {name: float(state.abs().max()) for name, state in live.items()}
    # A state without numbers in that step, as an anchor, gets the smallest.
    return {name: max(-20, min(20, round(math.log2(size or 2.0**-20)))) for name, size in largest.items()}
