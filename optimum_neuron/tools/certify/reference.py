# SPDX-License-Identifier: Apache-2.0
"""Recorded steps, run by the eager target: their results, the tokens that rounding may choose, and the part of states on a rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...arrays import to_numpy, to_torch
from ...parity.conditions import shaken
from ...step.attention import kv_cache
from ...step.attention.coded_states import LARGEST_CODE, Stored
from ...step.attention.kv_cache import KVCache
from ...step.attention.state import KeyValueState
from ...step.features.convolution.state import ConvolutionState
from ...step.features.recurrence.state import RecurrentState
from ...step.model_spec import ModelSpec
from ...step.ops import EAGER_OPS
from ...step.spec import GraphSpec, SamplingParams, TensorSpec
from ...step.state_specs import BY_TOKEN
from ...step.step import StepModule
from ...targets.eager import EagerExecutable
from ...targets.neuron.graphs.io import CACHE, COPIES, COPY_SLOT, KEEP_STATE, cut_dim
from ...targets.neuron.sharding.plan import PADDING, ShardPlan
from .random_blocks import gathered_spec
from .recording import RecordedStep, drawn_name, state_history


_TEMPERATURE = SamplingParams._fields.index("temperature")
Places = tuple[tuple[int, ...], ...]
# By state, without its namespace, and rank: the head or channel in each of the rank's places, or PADDING. States that every rank
# has whole are missing.
StateParts = Mapping[str, Places]
# Tried places of a uniform number, in parts of how far rounding moves it.
_PLACES = (-1.0, -0.75, -0.5, -0.25, 0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class SamplerCall:
    """A call of the sampler: logits `[rows, vocab]`, and its other arguments."""

    logits: Tensor
    others: tuple[Any, ...]

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
    """Results of recorded steps."""

    logits: dict[tuple[int, str], Tensor]  # by number of the step and name of the output, `[rows, vocab]`
    choices: dict[tuple[int, str], SamplerCall]  # the same of the outputs that are tokens
    states: dict[str, Tensor]  # at the end, by name, with the copies that slots keep
    trash: dict[str, int]  # by name of a state, the number of its last rows that take padding


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
    """Run the eager target over a history of its own, with all states and the copies that slots keep. `shake` moves each module's
    results by a unit in their last place, and one code of each head of coded keys and values."""
    cache = KVCache(each for each in states if each.name.startswith(CACHE))
    copies = [each for each in states if not each.name.startswith(CACHE)]
    kept = {each.name: torch.zeros(each.shape, dtype=getattr(torch, each.dtype)) for each in copies}
    calls: list[SamplerCall] = []

    def sample(logits: Tensor, *others: Any) -> Tensor:
        calls.append(SamplerCall(logits.clone(), others))
        return EAGER_OPS.sample(logits, *others)

    ops = replace(EAGER_OPS, sample=sample, write_cache=write_moved if shake else EAGER_OPS.write_cache)
    modules = {each.name: StepModule(model, cache, gathered_spec(each), ops).eval() for each in graphs}
    executable = EagerExecutable(
        modules, cache, {name.partition(".")[2]: to_numpy(each) for name, each in kept.items()}
    )
    for name, state in state_history(states, scales):
        if name in kept:
            kept[name].copy_(state)
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
                    params, *others = choice.others
                    choices[number, output.name] = SamplerCall(choice.logits, (torch.zeros_like(params), *others))
                    choices[number, drawn_name(output.name)] = choice
                else:
                    logits[number, output.name] = to_torch(result).clone()
    found, trash, sizes = dict(kept), dict.fromkeys(kept, 0), graphs[0]
    for each in states:
        if each.name not in kept:
            found[each.name] = to_torch(executable.read_state(each.name))
            has_blocks = sizes.kv_block_size is not None and each.name.startswith(BY_TOKEN)
            trash[each.name] = each.shape[0] - (sizes.kv_blocks if has_blocks else sizes.batch_size)
    return ReferenceRun(logits, choices, found, trash)


def _run_copy(executable: EagerExecutable, step: RecordedStep) -> None:
    source, destination, length = (int(each) for each in step.inputs.values())
    if step.graph == COPY_SLOT:
        executable.copy_slot(source, destination, length)
    elif length and step.graph == KEEP_STATE:
        executable.keep_state(source, destination)
    elif length:
        executable.restore_state(source, destination)


def write_moved(cache: Stored, states: Tensor, blocks: Tensor, columns: Tensor) -> None:
    """Write as `kv_cache.write_tokens` does, with one code of each token's head replaced by the next one towards zero."""

    def write_codes(cache: Tensor, states: Tensor, blocks: Tensor, columns: Tensor) -> None:
        kv_cache.write_tokens(cache, _move_codes(states) if states.dtype in LARGEST_CODE else states, blocks, columns)

    kv_cache.write_tokens(cache, states, blocks, columns, write_codes)


def _move_codes(codes: Tensor) -> Tensor:
    heads = codes.contiguous().view(-1, codes.shape[-1])
    chosen = torch.nn.functional.one_hot(torch.arange(len(heads)) % heads.shape[-1], heads.shape[-1]).bool()
    bits = heads.view(torch.uint8)
    if codes.dtype == torch.int8:
        moved = (heads + torch.where(heads > 0, -1, 1)).to(torch.int8).view(torch.uint8)
    else:
        moved = torch.where(bits % 128 == 0, bits + 1, bits - 1)
    return torch.where(chosen, moved, bits).view(codes.dtype).view(codes.shape)


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


def state_parts(plan: ShardPlan, spec: ModelSpec, model: nn.Module) -> StateParts:
    """Return the parts by the plan of a model with numbered layers. Convolutions share equally, or follow their recurrence's heads."""
    attention, convolutions, recurrences = (
        {cast(int, model.get_submodule(name).layer_idx): name for name in names}
        for names in (plan.attention, plan.convolutions, plan.recurrences)
    )
    ranks, parts = range(plan.world_size), dict[str, Places]()
    for layer in spec.states_of(KeyValueState):
        if layer.layer_idx in attention:
            layout = plan.attention[attention[layer.layer_idx]]
            slots, count = layout.key_value, layout.local_key_value
            heads: Places = tuple(slots[rank * count : (rank + 1) * count] for rank in ranks)
            parts |= {f"{role}_{layer.layer_idx}": heads for role in ("key", "value", "keyscale", "valuescale")}
    for each in spec.states_of(ConvolutionState):
        name, found = f"conv_{each.layer_idx}_{each.index}", recurrences.get(each.layer_idx)
        channels = [None if found is None else plan.channels(found, each.index, rank) for rank in ranks]
        if None not in channels:
            parts[name] = tuple(own for own in channels if own is not None)
        elif each.layer_idx in convolutions:
            count = each.channels // plan.world_size
            parts[name] = tuple(tuple(range(rank * count, (rank + 1) * count)) for rank in ranks)
    for state in spec.states_of(RecurrentState):
        if state.layer_idx in recurrences:
            shared, number = plan.recurrences[recurrences[state.layer_idx]], f"{state.layer_idx}_{state.index}"
            heads, inputs = (tuple(tuple(of(rank)) for rank in ranks) for of in (shared.heads_of, shared.inputs_of))
            parts |= {f"state_{number}": heads, f"anchor_{number}": heads, f"tail_{number}": inputs}
    return parts


def places_of(parts: StateParts | None, name: str, rank: int) -> tuple[int, ...] | None:
    """Return the rank's places of a state, or of copies of it; None where it has all of it."""
    found = None if parts is None else parts.get(name.rpartition(".")[2])
    return None if found is None else found[rank]


def take_part(state: Tensor, places: tuple[int, ...] | None) -> Tensor:
    """Return a rank's heads or channels of a state, zeros where it holds padding; all of it without `places`."""
    if places is None:
        return state
    dim = cut_dim(state.shape)
    taken = state.index_select(dim, torch.tensor([max(place, 0) for place in places]))
    kept = torch.tensor([place != PADDING for place in places]).view(-1, *[1] * (state.dim() - 1 - dim))
    return torch.where(kept, taken, torch.zeros((), dtype=state.dtype))


def real_heads(places: tuple[int, ...] | None) -> list[int] | None:
    """Return the places of a rank that hold a head; None where all do."""
    if places is None or PADDING not in places:
        return None
    return [place for place, head in enumerate(places) if head != PADDING]
