# SPDX-License-Identifier: Apache-2.0
"""Routed experts as a graph computes them: in the form of expert_forms.py that takes a core the least time.

All are exact for any routing: no token is dropped, and what a token gets depends on it and its experts alone. A token that
goes nowhere is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ....step.features.codes.weight import PACKED, QuantizedWeight
from ....step.features.experts.experts import Experts, ExpertsCall, dense_experts
from ..expert_forms import ExpertForm, ExpertLayer, choose, resized
from ..kernels.registry import experts_with_kernels
from ..quantized_product import QUANTIZED_EXPERTS
from ..sdk.hardware import Chip
from .expert_blocks import block_places


def experts_for(chip: Chip, like: int | None = None, kernels: Sequence[str] = ()) -> Experts:
    """Experts as graphs for a chip compute them.

    Args:
        like: in the form of a graph of so many tokens, whatever costs least in this one.
        kernels: that stand for what they compute.
    """
    compute = experts_with_kernels(in_form, kernels)

    def experts(call: ExpertsCall) -> Tensor:
        layer, tokens = expert_layer(call), len(call.index)
        form = choose(layer, tokens if like is None else like, chip)
        return compute(call, form if like is None else resized(form, layer, tokens, chip))

    return experts


def expert_layer(call: ExpertsCall) -> ExpertLayer:
    """What the cost model is told of a layer."""
    hidden, up = call.hidden_states.shape[-1], call.up_weight
    return ExpertLayer(
        experts=call.experts,
        per_token=call.index.shape[1],
        hidden=hidden,
        up=_params(up) // hidden,
        down=_params(call.down_weight) // hidden,
        dtype=str(call.dtype).removeprefix("torch."),
        itemsize=call.dtype.itemsize,
        code_bits=0 if isinstance(up, Tensor) else 4 if up.kind in PACKED else 8,
    )


def _params(weight: Tensor | QuantizedWeight) -> int:
    return weight[0].numel() if isinstance(weight, Tensor) else weight.outputs * weight.inputs


def in_form(call: ExpertsCall, form: ExpertForm) -> Tensor:
    """`[tokens, hidden]`."""
    if form.kind == "all":
        return dense_experts(call, _quantized_product)
    call = replace(call, index=call.index.to(torch.int32))
    outputs = _gathered(call, form) if form.kind == "gather" else _in_blocks(call, form)
    nowhere = call.index >= call.experts
    outputs = torch.where(nowhere[:, :, None], 0.0, outputs.view(*call.index.shape, -1))
    return replace(call, weights=torch.where(nowhere, 0.0, call.weights)).weighted_sum(outputs)


def _gathered(call: ExpertsCall, form: ExpertForm) -> Tensor:
    """`[tokens * k, hidden]`: each entry with its own expert's weights, and the first expert's where it goes nowhere."""
    index = torch.where(call.index < call.experts, call.index, 0).flatten()
    inputs = call.hidden_states.to(call.dtype)[:, None].expand(*call.index.shape, -1).flatten(0, 1)[:, None]
    return torch.cat([_compute(call, inputs[start:end], index[start:end]) for start, end in form.parts]).flatten(0, 1)


def _in_blocks(call: ExpertsCall, form: ExpertForm) -> Tensor:
    """`[tokens * k, hidden]`: of one block per expert in place and others whose experts' weights are gathered.

    A place that no entry has computes the first token, and nobody reads it.
    """
    (tokens, per_token), places = call.index.shape, (call.experts + form.gathered) * form.rows
    place, owners = block_places(call.index, call.experts, form.rows, form.gathered)
    place = place.flatten()
    # Entries that go nowhere have a place each behind the blocks, so that no two write to one.
    order = torch.arange(tokens * per_token, dtype=torch.int32)
    place = torch.where(call.index.flatten() < call.experts, place, places + order)
    token = torch.arange(tokens, dtype=torch.int32)[:, None].expand(-1, per_token).flatten()
    taken = torch.zeros(places + tokens * per_token, dtype=torch.int32).index_put((place,), token)[:places]
    inputs = call.hidden_states.to(call.dtype).index_select(0, taken).view(-1, form.rows, call.hidden_states.shape[-1])
    outputs = [_compute(call, inputs[: call.experts])]
    for start, end in form.parts:
        part = inputs[call.experts + start : call.experts + end]
        outputs.append(_compute(call, part, owners[start:end]))
    return torch.cat(outputs).flatten(0, 1).index_select(0, torch.where(place < places, place, 0))


def _compute(call: ExpertsCall, inputs: Tensor, index: Tensor | None = None) -> Tensor:
    """`[blocks, rows, hidden]`, both: a block by the expert of its number in `index`, or of its own number."""
    up = call.activate(_product(call, inputs, call.up_weight, call.up_bias, index))
    return call.normalize(_product(call, up, call.down_weight, call.down_bias, index))


def _product(
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
    """`[blocks, rows, out]` float32."""
    output: Tensor = QUANTIZED_EXPERTS(x, weight.codes, weight.scale, weight.shift, index, weight.kind, x.shape[1])
    return output
