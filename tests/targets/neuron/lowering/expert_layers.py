# SPDX-License-Identifier: Apache-2.0
"""Layers of experts as functions of their tensors, in float64 token by token, and as HLO that XLA runs on this CPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch
from lowered import lower_function
from torch import Tensor

from optimum_neuron.step.features.experts.experts import ExpertsCall
from optimum_neuron.targets.neuron.expert_forms import ExpertForm
from optimum_neuron.targets.neuron.lowering.experts import in_form
from optimum_neuron.targets.neuron.lowering.lower import LoweredGraph
from optimum_neuron.targets.neuron.run.hlo_executor import HloProgram


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
                inner = _gated(call.hidden_states[token].double() @ up + biases[0])
                output[token] += (inner @ down + biases[1]) * call.weights[token, place].double()
    return output


def lower_form(form: ExpertForm, call: ExpertsCall, tensors: Weights) -> LoweredGraph:
    """A layer's graph of its hidden states, its routing and its weights, which are inputs in this order."""

    def function(hidden: Tensor, index: Tensor, weights: Tensor, *layer: Tensor) -> Tensor:
        return in_form(call_of(hidden, index, weights, layer, transposed=call.layer.is_transposed), form)

    return lower_function(function, (call.hidden_states, call.index, call.weights, *tensors))


class FormGraph:
    """A lowered form, to be run on other tokens and routings of the same shapes."""

    def __init__(self, form: ExpertForm, call: ExpertsCall, tensors: Weights, folder: Path) -> None:
        self.graph = lower_form(form, call, tensors)
        self._tensors = tensors
        path = folder / "function.hlo"
        path.write_bytes(self.graph.hlo)
        self._program = HloProgram(path, self.graph.io)

    def __call__(self, call: ExpertsCall) -> Tensor:
        given = (call.hidden_states, call.index.int(), call.weights, *self._tensors)
        named = {f"x.{place}": tensor for place, tensor in enumerate(given)}
        device = self._program.device
        (output,) = self._program.run([named[each.name].contiguous().to(device) for each in self.graph.io.inputs])
        return output.cpu()
