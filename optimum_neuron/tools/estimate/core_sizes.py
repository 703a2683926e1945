# SPDX-License-Identifier: Apache-2.0
"""One core's share of a model: weights, cache and products."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ...step.attention.state import KeyValueState
from ...step.features.convolution.state import ConvolutionState
from ...step.features.recurrence.state import RecurrentState
from ...step.model_spec import ModelSpec
from ...targets.neuron.operators.expert_forms import ExpertLayer
from ...targets.neuron.sharding import shard_plan
from .model_sizes import Kind, LayerKinds, ModelSizes, WeightSize


_RANK_BYTES = 4  # each rank's own number, int32, is a weight
_SCALE_BYTES = 4  # scale of a head's codes
_STATE_BYTES = 4  # number of a recurrence's state, float32 in every model


@dataclass(frozen=True)
class ExpertSizes:
    """Routed experts on a core, in so many layers that are alike; `bytes` counts all of them."""

    layer: ExpertLayer
    layers: int
    bytes: int

    @property
    def params(self) -> int:
        """Parameters that tokens are multiplied with, all layers together."""
        return self.layers * self.layer.experts * self.layer.expert_params


@dataclass(frozen=True)
class AttentionSizes:
    """Attention layers on a core that are alike."""

    layers: int
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, kw_only=True)
class CoreSizes:
    """The share of a model on one core of a tensor parallel group."""

    weight_bytes: int  # all weights and constant buffers
    table_bytes: int  # the part of these in embedding tables, of which a step reads a few rows
    linear_params: int  # parameters that each token of a step is multiplied with
    head_params: int  # the same of each row of its logits
    experts: tuple[ExpertSizes, ...]
    attention: tuple[AttentionSizes, ...]
    block_width: int  # elements per token that the projections of the widest block read and write, without experts
    spec: ModelSpec  # with the core's own kv heads
    local_vocab: int  # columns of the core's share of the head
    hidden_size: int
    keeps_logits: bool
    dtype: str
    itemsize: int
    cache_has_codes: bool = False  # keys and values are codes of a byte, with a scale for each head of a token

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values in all attention layers."""
        total = 0
        for each in self.attention:
            elements = each.key_dim + each.value_dim
            of_head = elements + 2 * _SCALE_BYTES if self.cache_has_codes else elements * self.itemsize
            total += each.layers * each.kv_heads * of_head
        return total

    @property
    def heads(self) -> int:
        return sum(layer.layers * layer.heads for layer in self.attention)

    @property
    def state_bytes(self) -> int:
        """Bytes that a step reads and writes of a slot, whatever its length: inputs of convolutions, and states."""
        states = sum(each.heads * each.key_dim * each.value_dim for each in self.spec.states_of(RecurrentState))
        inputs = sum(each.past * each.channels for each in self.spec.states_of(ConvolutionState))
        return _STATE_BYTES * states + self.itemsize * inputs


def core_sizes(sizes: ModelSizes, tensor_parallel_size: int) -> CoreSizes:
    """Return each core's share of a model; raise ValueError where so many cannot share it."""
    shapes, spec, heads = _core_shares(sizes, tensor_parallel_size)
    local = [replace(weight, shape=shapes[weight.name]) for weight in sizes.weights]
    params: dict[Kind, int] = defaultdict(int)
    sizes_of: dict[Kind, int] = defaultdict(int)
    widths: dict[str, int] = defaultdict(int)
    for weight in local:
        size = math.prod(weight.shape) * weight.itemsize
        params[weight.kind] += weight.count
        sizes_of[weight.kind] += size
        sizes_of["table"] += size * weight.also_table
        if weight.kind == "linear":
            widths[weight.block] += sum(weight.shape) + (weight.values - 1) * weight.shape[-1]
    alike = Counter(
        (count, layer.kv_heads, layer.key_dim, layer.value_dim)
        for layer, count in zip(spec.states_of(KeyValueState), heads, strict=True)
    )
    return CoreSizes(
        weight_bytes=sum(sizes_of.values()) + (_RANK_BYTES if tensor_parallel_size > 1 else 0),
        table_bytes=sizes_of["table"],
        linear_params=params["linear"],
        head_params=params["head"],
        experts=tuple(_find_experts(local, sizes)),
        attention=tuple(AttentionSizes(layers, *key) for key, layers in alike.items()),
        block_width=max(widths.values(), default=0),
        spec=spec,
        local_vocab=params["head"] // sizes.hidden_size or sizes.spec.vocab_size,
        hidden_size=sizes.hidden_size,
        keeps_logits=sizes.keeps_logits,
        dtype=sizes.dtype,
        itemsize=getattr(torch, sizes.dtype).itemsize,
    )


def _find_experts(weights: list[WeightSize], sizes: ModelSizes) -> Iterator[ExpertSizes]:
    blocks: dict[str, list[WeightSize]] = defaultdict(list)
    for weight in weights:
        if weight.kind == "experts":
            blocks[weight.block].append(weight)
    alike: dict[ExpertLayer, list[int]] = defaultdict(list)
    for block in blocks.values():
        alike[_expert_layer(block, sizes)].append(sum(math.prod(w.shape) * w.itemsize for w in block))
    yield from (ExpertSizes(layer, len(bytes_of), sum(bytes_of)) for layer, bytes_of in alike.items())


def _expert_layer(block: list[WeightSize], sizes: ModelSizes) -> ExpertLayer:
    """Return a layer by its weights, which lie either way around; other tensors are biases."""
    weights = [w for w in block if len(w.shape) == 3 and w.values]
    params = {w.name.removesuffix("_codes"): w.count // w.experts for w in weights}
    down = sum(size for name, size in params.items() if name.endswith("down_proj"))
    has_codes = any(w.name.endswith("_codes") for w in weights)
    return ExpertLayer(
        experts=block[0].experts,
        per_token=block[0].per_token,
        hidden=sizes.hidden_size,
        up=(sum(params.values()) - down) // sizes.hidden_size,
        down=down // sizes.hidden_size,
        dtype=sizes.dtype,
        itemsize=getattr(torch, sizes.dtype).itemsize if has_codes else block[0].itemsize,
        code_bits=8 // weights[0].values if has_codes else 0,
    )


def _core_shares(sizes: ModelSizes, cores: int) -> tuple[dict[str, tuple[int, ...]], ModelSpec, list[int]]:
    """Return each tensor's shape on a core, the core's spec, and its query heads by attention layer."""
    if cores == 1:
        return {weight.name: weight.shape for weight in sizes.weights}, sizes.spec, list(sizes.heads)
    try:
        # One layer of each kind takes a tenth of the time; the whole model where that is refused, for its reason.
        kinds, plan = sizes.kinds, shard_plan(sizes.kinds.model, cores)
    except ValueError:
        kinds, plan = LayerKinds(sizes.model, "", ()), shard_plan(sizes.model, cores)
    shorts = [(kinds.short_name(name), module) for name, module in sizes.model.named_modules()]
    layouts = {module.layer_idx: plan.attention[short] for short, module in shorts if short in plan.attention}
    convolutions = {module.layer_idx for short, module in shorts if short in plan.convolutions}
    recurrent = {module.layer_idx: short for short, module in shorts if short in plan.recurrences}
    layers, heads = list[KeyValueState](), list[int]()
    for layer, count in zip(sizes.spec.states_of(KeyValueState), sizes.heads, strict=True):
        layout = layouts.get(layer.layer_idx)  # None: every core computes all heads
        layers.append(replace(layer, kv_heads=layout.local_key_value) if layout else layer)
        heads.append(layout.local_query if layout else count)
    convolved = list[ConvolutionState]()
    for state in sizes.spec.states_of(ConvolutionState):
        # Channels of the core's heads of a recurrence, or an equal share.
        name = recurrent.get(state.layer_idx)
        own = None if name is None else plan.channels(name, state.index, 0)
        count = state.channels // (cores if state.layer_idx in convolutions else 1) if own is None else len(own)
        convolved.append(replace(state, channels=count))
    recurrences = list[RecurrentState]()
    for kept in sizes.spec.states_of(RecurrentState):
        shared = plan.recurrences.get(recurrent.get(kept.layer_idx, ""))
        part = shared and replace(kept, heads=len(shared.heads_of(0)), width=len(shared.inputs_of(0)))
        recurrences.append(part or kept)
    whole = (s for s in sizes.spec.states if not isinstance(s, KeyValueState | ConvolutionState | RecurrentState))
    spec = replace(sizes.spec, states=(*layers, *convolved, *recurrences, *whole))
    return {weight.name: plan.local_shape(kinds.short_name(weight.name)) for weight in sizes.weights}, spec, heads
