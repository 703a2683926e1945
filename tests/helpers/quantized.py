# SPDX-License-Identifier: Apache-2.0
"""Models with quantized weights of all forms, and what their codes stand for, written out once more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from optimum_neuron.checkpoints.quantize.rounding import round_fp8, round_int4, round_int8
from optimum_neuron.step.features.codes.modules import plain_weights, replace_module, replace_weights
from optimum_neuron.step.features.codes.weight import FP4_VALUES, QuantizedWeight


def values_of(kind: str, codes: Tensor, scale: Tensor, shift: Tensor | None) -> Tensor:
    """The weight in float32."""
    if kind in ("int4", "fp4"):
        codes = torch.stack([codes % 16, codes // 16], -1).flatten(-2)
    table = {"fp4": torch.tensor(FP4_VALUES), "int4": torch.arange(16) - (8.0 if shift is None else 0.0)}
    values = table[kind][codes.int()] if kind in table else codes.float()
    each = values.shape[-1] // scale.shape[-1]
    weight = values * scale.float().repeat_interleave(each, -1)
    return weight if shift is None else weight + shift.repeat_interleave(each, -1)


def int8_in_groups(weight: Tensor) -> QuantizedWeight:
    """As GGUF's Q8_0, with fewer inputs in a group."""
    rounded = round_int8(weight.unflatten(-1, (-1, 16)))
    return QuantizedWeight("int8", rounded.codes.flatten(-2), rounded.scale[..., 0].half())


def fp4_in_groups(weight: Tensor) -> QuantizedWeight:
    """Codes of e2m1 with the scales of 16 inputs; each is that of the nearest value."""
    groups = weight.unflatten(-1, (-1, 16))
    scale = groups.abs().amax(-1, keepdim=True) / 6
    codes = ((groups / scale)[..., None] - torch.tensor(FP4_VALUES)).abs().argmin(-1).flatten(-2).to(torch.uint8)
    return QuantizedWeight("fp4", codes[..., ::2] | (codes[..., 1::2] << 4), scale[..., 0])


# One of each form, of weights whose inputs are a multiple of 16; groups are an even number or an odd one, or all inputs are one.
ROUNDINGS: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    "int8": round_int8,
    "fp8": round_fp8,
    "int4": lambda weight: round_int4(weight, 16),
    "int4 with a zero point": lambda weight: round_int4(weight, 16, zero_point=True),
    "int4 of one group": lambda weight: round_int4(weight, weight.shape[-1], zero_point=True),
    "int8 in groups": int8_in_groups,
    "fp4": fp4_in_groups,
}
_MIXED = {
    "0.self_attn": {"q_proj": "int4", "k_proj": "int4", "v_proj": "fp8", "o_proj": "int8"},
    "0.mlp": {"gate_proj": "fp8", "up_proj": "fp8", "down_proj": "int4 with a zero point"},
    "1.self_attn": {"q_proj": "int8", "k_proj": "int8", "v_proj": "int8", "o_proj": "fp4"},
    "1.mlp": {"gate_proj": "int4 with a zero point", "up_proj": "int4 of one group", "down_proj": "int8 in groups"},
}


def quantize_mixed(model: PreTrainedModel, config: Any, calibration: None = None) -> None:
    """In place of `export.quantize.quantize`: a Llama of two layers whose linear layers have all forms."""
    names = {f"model.layers.{path}.{own}": form for path, layers in _MIXED.items() for own, form in layers.items()}
    for name, form in (names | {"lm_head": "int8"}).items():
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        replace_module(model, name, ROUNDINGS[form](linear.weight.detach()))


_EXPERTS = {
    "0": {"gate_up_proj": "int4 with a zero point", "down_proj": "int8"},
    "1": {"gate_up_proj": "int4", "down_proj": "int4 of one group"},
}


def quantize_experts(model: PreTrainedModel, config: Any, calibration: None = None) -> None:
    """The same of a Qwen3Moe of two layers: its experts alone."""
    for number, forms in _EXPERTS.items():
        layer = model.get_submodule(f"model.layers.{number}.mlp.experts")
        replace_weights(
            layer, {name: ROUNDINGS[forms[name]](each.detach()) for name, each in plain_weights(layer).items()}
        )
