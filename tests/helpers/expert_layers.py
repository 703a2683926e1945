# SPDX-License-Identifier: Apache-2.0
"""Layers of experts as functions of their tensors, in float64 token by token, and as HLO that XLA runs on this CPU."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from lowered import lower_function, run_lowered
from torch import Tensor

from optimum_neuron.step.features.experts.experts import ExpertsCall
from optimum_neuron.targets.neuron.graphs import hlo
from optimum_neuron.targets.neuron.graphs.io import LoweredGraph
from optimum_neuron.targets.neuron.operators.expert_forms import ExpertForm
from optimum_neuron.targets.neuron.operators.experts import in_form


Weights = tuple[Tensor, ...]  # up, down, and where there are biases theirs


def weights_of(
    experts: int, hidden: int, inner: int, *, transposed: bool = False, biases: bool = False, dtype: str = "float32"
) -> Weights:
    """Random ones: `[experts, out, in]`, or where the layer is transposed `[experts, in, out]`."""
    generator = torch.Generator().manual_seed(experts)
    shapes = [(experts, 2 * inner, hidden), (experts, hidden, inner)]
    tensors = [torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for shape in shapes]
    tensors = [each.transpose(1, 2).contiguous() if transposed else each for each in tensors]
    if biases:
        tensors += [torch.randn(experts, size, generator=generator) for size in (2 * inner, hidden)]
    return tuple(each.to(getattr(torch, dtype)) for each in tensors)


def call_of(
    hidden: Tensor, index: Tensor, weights: Tensor, tensors: Weights, *, transposed: bool = False
) -> ExpertsCall:
    """A layer that is gated as most are."""
    layer = SimpleNamespace(
        gate_up_proj=tensors[0],
        down_proj=tensors[1],
        has_gate=True,
        has_bias=len(tensors) > 2,
        is_transposed=transposed,
        _apply_gate=_gated,
    )
    if layer.has_bias:
        layer.gate_up_proj_bias, layer.down_proj_bias = tensors[2:]
    return ExpertsCall(layer, hidden, index, weights)


def _gated(up: Tensor) -> Tensor:
    gate, values = up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * values


def one_by_one(call: ExpertsCall) -> Tensor:
    """`[tokens, hidden]` float64."""
    output = torch.zeros_like(call.hidden_states, dtype=torch.float64)
    for token, places in enumerate(call.index.tolist()):
        for place, expert in enumerate(places):
            if expert < call.experts:
                up, down = (each[expert].double() for each in (call.up, call.down))
                up, down = (each if call.layer.is_transposed else each.t() for each in (up, down))
                biases = [0.0 if each is None else each[expert].double() for each in (call.up_bias, call.down_bias)]
                inner = call.activate(call.hidden_states[token].double() @ up + biases[0])
                output[token] += call.normalize(inner @ down + biases[1]) * call.weights[token, place].double()
    return output


def tensors_of(call: ExpertsCall) -> Weights:
    tensors = call.up, call.down, call.up_bias, call.down_bias
    return tuple(each for each in tensors if each is not None)


def lower_form(form: ExpertForm, call: ExpertsCall) -> LoweredGraph:
    """A layer's graph of its hidden states, its routing and its weights, which are inputs in this order."""

    def function(hidden: Tensor, index: Tensor, weights: Tensor, *layer: Tensor) -> Tensor:
        return in_form(call_of(hidden, index, weights, layer, transposed=call.layer.is_transposed), form)

    return lower_function(function, (call.hidden_states, call.index, call.weights, *tensors_of(call)))


def run_form(graph: LoweredGraph, call: ExpertsCall) -> Tensor:
    """Run a lowered form on tokens and routings of its shapes."""
    (output,) = run_lowered(graph, (call.hidden_states, call.index.int(), call.weights, *tensors_of(call)))
    return output


def expert_kinds(data: bytes) -> set[str]:
    """The kinds of form in a graph's products with weights `[experts, in, out]`, by whether these lie in place or are gathered."""
    by_id = {each.id: each for _, each in hlo.instructions(hlo.parse(data))}
    places: dict[str, set[bool]] = {}
    for dot in (each for each in by_id.values() if each.opcode == "dot"):
        source, gathered = by_id[dot.operand_ids[1]], False
        while source.opcode in ("reshape", "convert", "copy", "broadcast", "gather"):
            gathered = gathered or source.opcode == "gather"
            source = by_id[source.operand_ids[0]]
        if source.opcode == "parameter" and "_proj" in source.name and len(source.shape.dimensions) == 3:
            places.setdefault(source.name, set()).add(gathered)
    names = {(False,): "all", (True,): "gather", (False, True): "blocks"}
    return {names[tuple(sorted(each))] for each in places.values()}
