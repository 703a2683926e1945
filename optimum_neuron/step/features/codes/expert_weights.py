# SPDX-License-Identifier: Apache-2.0
"""Quantized weights of transformers' experts, which are parameters of one module: `[experts, outputs, inputs]`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .weight import QuantizedWeight


# Of each quantized weight by name, its kind and what activations are rounded to.
_KINDS = "_quantized_kinds"
_PARTS = ("codes", "scale", "shift")


def expert_weight(layer: Any, name: str) -> Tensor | QuantizedWeight:
    """A layer's weight by the name of its parameter, plain or quantized."""
    form = getattr(layer, _KINDS, {}).get(name)
    if form is None:
        weight: Tensor = getattr(layer, name)
        return weight
    kind, activations = form
    codes, scale, shift = (getattr(layer, f"{name}_{part}") for part in _PARTS)
    return QuantizedWeight(kind, codes, scale, shift, activations)


def quantized_weights(layer: nn.Module) -> dict[str, QuantizedWeight]:
    """Those of a layer that are quantized, by the names that their parameters had."""
    found = {name: expert_weight(layer, name) for name in getattr(layer, _KINDS, {})}
    return {name: weight for name, weight in found.items() if isinstance(weight, QuantizedWeight)}


def plain_weights(layer: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of a layer of experts that are not quantized, by name."""
    return {name: weight for name, weight in layer.named_parameters(recurse=False) if weight.dim() == 3}


def natural_shape(layer: Any, weight: Tensor) -> tuple[int, int, int]:
    """`[experts, outputs, inputs]` of a plain weight, however it lies."""
    experts, rows, columns = weight.shape
    return (experts, columns, rows) if layer.is_transposed else (experts, rows, columns)


def replace_weights(layer: Any, weights: Mapping[str, QuantizedWeight]) -> None:
    """Takes quantized weights in place of all plain ones of a layer of experts, in `[experts, outputs, inputs]`.

    Raises:
        ValueError: they are not those of the layer.
    """
    plain = plain_weights(layer)
    expected = {name: natural_shape(layer, weight) for name, weight in plain.items()}
    found = {name: (*each.codes.shape[:-1], each.inputs) for name, each in weights.items()}
    if found != expected:
        raise ValueError(f"a layer of experts has the weights {expected}, and its quantized ones are {found}")
    for name, weight in weights.items():
        delattr(layer, name)
        for part in _PARTS:
            layer.register_buffer(f"{name}_{part}", getattr(weight, part))
    setattr(layer, _KINDS, {name: (weight.kind, weight.activations) for name, weight in weights.items()})
    layer.is_transposed = False


def round_activations_of(layer: nn.Module, name: str, activations: str) -> None:
    """Has what meets a quantized weight of a layer of experts rounded, from now on."""
    forms = getattr(layer, _KINDS)
    setattr(layer, _KINDS, forms | {name: (forms[name][0], activations)})
