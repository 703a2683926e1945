# SPDX-License-Identifier: Apache-2.0
"""Weights of layers of experts, plain or quantized."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .weight import QuantizedWeight


# Of each quantized weight by name, its kind and what activations are rounded to.
_KINDS = "_quantized_kinds"
_PARTS = ("codes", "scale", "shift")


def is_experts(module: nn.Module) -> bool:
    """Return whether a module follows transformers' experts interface, which says how its parameters are laid out."""
    return all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "is_concatenated"))


def expert_weight(layer: Any, name: str) -> Tensor | QuantizedWeight:
    """Return a layer's weight by the name of its parameter, plain or quantized."""
    form = getattr(layer, _KINDS, {}).get(name)
    if form is None:
        weight: Tensor = getattr(layer, name)
        return weight
    kind, activations = form
    codes, scale, shift = (getattr(layer, f"{name}_{part}") for part in _PARTS)
    return QuantizedWeight(kind, codes, scale, shift, activations)


def quantized_weights(layer: nn.Module) -> dict[str, QuantizedWeight]:
    """Return the quantized weights of a layer, by the names that their parameters had."""
    found = {name: expert_weight(layer, name) for name in getattr(layer, _KINDS, {})}
    return {name: weight for name, weight in found.items() if isinstance(weight, QuantizedWeight)}


def plain_weights(layer: nn.Module) -> dict[str, nn.Parameter]:
    """Return the plain weights of a layer of experts, by name."""
    return {name: weight for name, weight in layer.named_parameters(recurse=False) if weight.dim() == 3}


def natural_shape(layer: Any, weight: Tensor) -> tuple[int, int, int]:
    """Return `[experts, outputs, inputs]` of a plain weight, in whichever order its dimensions lie."""
    experts, rows, columns = weight.shape
    return (experts, columns, rows) if layer.is_transposed else (experts, rows, columns)


def replace_weights(layer: Any, weights: Mapping[str, QuantizedWeight]) -> None:
    """Replace all plain weights of a layer of experts by quantized ones, in `[experts, outputs, inputs]`.

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
    """Round the inputs of a layer of experts' quantized weight from now on."""
    forms = getattr(layer, _KINDS)
    setattr(layer, _KINDS, forms | {name: (forms[name][0], activations)})
