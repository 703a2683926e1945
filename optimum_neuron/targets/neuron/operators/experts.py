# SPDX-License-Identifier: Apache-2.0
"""Routed experts as a graph computes them, in a form of expert_forms.py, exact for any routing.

No token is dropped, and its result depends on it and its experts alone. A token that goes nowhere is zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ....step.features.codes.weight import PACKED, QuantizedWeight
from ....step.features.experts.experts import Experts, ExpertsCall, dense_experts
from ..sdk.hardware import Chip
from .codes import QUANTIZED_EXPERTS
from .expert_forms import ExpertForm, ExpertLayer, choose, resize_form


# Tokens that one product with a triangle counts.
_COUNTED = 128
# From a call and a form to `[tokens, hidden]`.
InForm = Callable[[ExpertsCall, ExpertForm], Tensor]


def experts_for(chip: Chip, like: int | None, compute: InForm) -> Experts:
    """Return experts as graphs for a chip compute them, in the form of a graph of `like` tokens, or that which costs least in this one."""

    def experts(call: ExpertsCall) -> Tensor:
        layer, tokens = expert_layer(call), len(call.index)
        form = choose(layer, tokens if like is None else like, chip)
        return compute(call, form if like is None else resize_form(form, layer, tokens, chip))

    return experts


def expert_layer(call: ExpertsCall) -> ExpertLayer:
    hidden, up = call.hidden_states.shape[-1], call.up_weight
    both = (up, call.down_weight)
    sizes = [each[0].numel() if isinstance(each, Tensor) else each.outputs * each.inputs for each in both]
    return ExpertLayer(
        experts=call.experts,
        per_token=call.index.shape[1],
        hidden=hidden,
        up=sizes[0] // hidden,
        down=sizes[1] // hidden,
        dtype=str(call.compute_dtype).removeprefix("torch."),
        itemsize=call.compute_dtype.itemsize,
        code_bits=0 if isinstance(up, Tensor) else 4 if up.kind in PACKED else 8,
    )


def in_form(call: ExpertsCall, form: ExpertForm) -> Tensor:
    if form.kind == "all":
        return dense_experts(call, _quantized_product)
    call = replace(call, index=call.index.to(torch.int32))
    if form.kind == "gather":  # each entry by its own expert's weights, or by the first expert's where it goes nowhere
        index = torch.where(call.index < call.experts, call.index, 0).flatten()
        inputs = call.hidden_states.to(call.compute_dtype)[:, None].expand(*call.index.shape, -1)
        inputs = inputs.flatten(0, 1)[:, None]
        parts = [_apply_experts(call, inputs[start:end], index[start:end]) for start, end in form.parts]
        outputs = torch.cat(parts).flatten(0, 1)
    else:
        outputs = _in_blocks(call, form)
    nowhere = call.index >= call.experts
    outputs = torch.where(nowhere[:, :, None], 0.0, outputs.view(*call.index.shape, -1))
    return replace(call, weights=torch.where(nowhere, 0.0, call.weights)).weighted_sum(outputs)


def _in_blocks(call: ExpertsCall, form: ExpertForm) -> Tensor:
    (tokens, per_token), places = call.index.shape, (call.experts + form.gathered) * form.rows
    place, owners = block_places(call.index, call.experts, form.rows, form.gathered)
    place = place.flatten()
    # Entries that go nowhere have a place each after the blocks, so that no two write to one.
    order = torch.arange(tokens * per_token, dtype=torch.int32)
    place = torch.where(call.index.flatten() < call.experts, place, places + order)
    token = torch.arange(tokens, dtype=torch.int32)[:, None].expand(-1, per_token).flatten()
    taken = torch.zeros(places + tokens * per_token, dtype=torch.int32).index_put((place,), token)[:places]
    inputs = call.hidden_states.to(call.compute_dtype).index_select(0, taken)
    inputs = inputs.view(-1, form.rows, inputs.shape[-1])
    outputs = [_apply_experts(call, inputs[: call.experts])]
    for start, end in form.parts:
        part = inputs[call.experts + start : call.experts + end]
        outputs.append(_apply_experts(call, part, owners[start:end]))
    return torch.cat(outputs).flatten(0, 1).index_select(0, torch.where(place < places, place, 0))


def _apply_experts(call: ExpertsCall, inputs: Tensor, index: Tensor | None = None) -> Tensor:
    """Return `[blocks, rows, hidden]` for inputs of that shape: a block by the expert of its number in `index`, or of its own number."""
    up = call.activate(_multiply_weight(call, inputs, call.up_weight, call.up_bias, index))
    return call.normalize(_multiply_weight(call, up, call.down_weight, call.down_bias, index))


def _multiply_weight(
    call: ExpertsCall, x: Tensor, weight: Tensor | QuantizedWeight, bias: Tensor | None, index: Tensor | None
) -> Tensor:
    if index is not None and bias is not None:
        bias = bias.index_select(0, index)
    if isinstance(weight, QuantizedWeight):
        wide = _quantized_product(x, weight, index)
        return (wide if bias is None else wide + bias[:, None]).to(x.dtype)
    weight = weight if call.layer.is_transposed else weight.transpose(1, 2)
    if index is not None:
        weight = weight.index_select(0, index)
    output = x @ weight
    return output if bias is None else output + bias[:, None]


def _quantized_product(x: Tensor, weight: QuantizedWeight, index: Tensor | None = None) -> Tensor:
    output: Tensor = QUANTIZED_EXPERTS(x, weight.codes, weight.scale, weight.shift, index, weight.kind, x.shape[1])
    return output


def block_places(index: Tensor, experts: int, rows: int, gathered: int) -> tuple[Tensor, Tensor]:
    """Give each entry of a routing a place in a block of its expert; no two get the same.

    Block e is the first of expert e; `gathered` others follow, in the order of their experts. Without a sort, a cumulative sum or a division:
    all numbers are whole and below 2^24, where float32 and its sums are exact.

    For `index [tokens, k]`, nowhere from `experts` on, and blocks of `rows`, a power of two, return `[tokens, k]` int32, block * rows + row,
    and `[gathered]` int32, the expert of each further block; any where they are not in use.
    """
    order = torch.arange(experts, dtype=torch.int32)
    chosen = index[:, :, None] == order  # [tokens, k, experts]
    counts = chosen.sum(1, dtype=torch.float32)
    total = counts.sum(0)
    # And how often a token's earlier places name the same expert; routers name each once.
    column = torch.arange(index.shape[1], dtype=torch.int32)
    in_row = ((index[:, :, None] == index[:, None]) & (column < column[:, None])).sum(-1, dtype=torch.float32)
    position = _select_chosen(chosen, earlier_sums(counts)[:, None]) + in_row
    block = (position * (1 / rows)).floor()
    further = ((total - 1).clamp(min=0) * (1 / rows)).floor()  # of each expert, beyond its first
    start = torch.where(order < order[:, None], further, 0.0).sum(1)
    numbers = torch.arange(gathered, dtype=torch.float32)
    owners = ((start + further) <= numbers[:, None]).sum(1, dtype=torch.float32).clamp(max=experts - 1)
    first = _select_chosen(chosen, order.float())
    moved = torch.where(block > 0, experts + _select_chosen(chosen, start) + block - 1, first)
    return (moved * rows + position - block * rows).to(torch.int32), owners.to(torch.int32)


def earlier_sums(counts: Tensor) -> Tensor:
    """Return `[tokens, n]` float32: the sum of each column above a row."""
    tokens, width = counts.shape
    groups = pad(counts, (0, 0, 0, -tokens % _COUNTED)).view(-1, _COUNTED, width)
    order = torch.arange(_COUNTED, dtype=torch.int32)
    within = (order < order[:, None]).float().expand(len(groups), -1, -1) @ groups
    if len(groups) > 1:
        number = torch.arange(len(groups), dtype=torch.int32)
        before = (number < number[:, None])[:, :, None]
        within = within + torch.where(before, groups.sum(1), 0.0).sum(1)[:, None]
    return within.flatten(0, 1)[:tokens]


def _select_chosen(chosen: Tensor, values: Tensor) -> Tensor:
    return torch.where(chosen, values, 0.0).sum(-1)
