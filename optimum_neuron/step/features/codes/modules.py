# SPDX-License-Identifier: Apache-2.0
"""Modules with quantized weights: linear layers with a product that the step chooses, and tables of embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from ...serving import set_within
from .weight import QuantizedWeight, integer_product


# From `x [..., inputs]`, a weight and `bias [outputs]` to `[..., outputs]` of x's type.
QuantizedProduct = Callable[[Tensor, QuantizedWeight, Tensor | None], Tensor]


def dequantized_product(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Compute transformers' linear layer with the dequantized weight, in float32, rounded once to x's type."""
    wide = None if bias is None else bias.float()
    return nn.functional.linear(x.float(), weight.dequantize(), wide).to(x.dtype)


def reference_product(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Compute what all others do, to float32 rounding: `dequantized_product`, or where activations are rounded `integer_product`."""
    if weight.activations is None:
        return dequantized_product(x, weight, bias)
    wide = integer_product(x, weight)
    return (wide if bias is None else wide + bias.float()).to(x.dtype)


_product: ContextVar[QuantizedProduct] = ContextVar("how quantized layers multiply", default=reference_product)


def multiplying(product: QuantizedProduct) -> AbstractContextManager[None]:
    """Set the function by which the quantized layers of a model that runs within compute."""
    return set_within(_product, product)


class QuantizedLinear(nn.Module):
    """A linear layer with a quantized weight `[outputs, inputs]` and a plain bias.

    It has no `weight`: code that reads one itself gets an error, not codes.
    """

    codes: Tensor
    scale: Tensor
    shift: Tensor | None
    bias: nn.Parameter | None

    def __init__(self, weight: QuantizedWeight, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.kind, self.activations = weight.kind, weight.activations
        self.in_features, self.out_features = weight.inputs, weight.outputs
        for name in ("codes", "scale", "shift"):
            self.register_buffer(name, getattr(weight, name))
        self.register_parameter("bias", bias)

    @property
    def quantized_weight(self) -> QuantizedWeight:
        return QuantizedWeight(self.kind, self.codes, self.scale, self.shift, self.activations)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return _product.get()(x, self.quantized_weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, kind={self.kind}"


class QuantizedEmbedding(nn.Module):
    """A table of embeddings `[tokens, hidden]` as whole numbers without a shift, such as that of a head that shares it."""

    codes: Tensor
    scale: Tensor

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self.kind, self.dtype = weight.kind, dtype
        self.num_embeddings, self.embedding_dim = weight.outputs, weight.inputs
        self.register_buffer("codes", weight.codes)
        self.register_buffer("scale", weight.scale)

    @property
    def quantized_weight(self) -> QuantizedWeight:
        return QuantizedWeight(self.kind, self.codes, self.scale)

    def forward(self, input_ids: Tensor) -> Tensor:
        rows, scales = (nn.functional.embedding(input_ids, each).float() for each in (self.codes, self.scale))
        if (groups := scales.shape[-1]) == 1:
            return (rows * scales).to(self.dtype)
        return (rows.unflatten(-1, (groups, -1)) * scales.unsqueeze(-1)).flatten(-2).to(self.dtype)


def replace_linear(model: nn.Module, name: str, weight: QuantizedWeight) -> None:
    """Replace a model's linear layer by a quantized one, with the same bias; ValueError where there is none of that name and size."""
    parent_name, _, own = name.rpartition(".")
    try:
        parent, module = model.get_submodule(parent_name), model.get_submodule(name)
    except AttributeError:
        parent, module = model, None
    if not isinstance(module, nn.Linear):
        raise ValueError(f"{type(model).__name__} has no linear layer {name} for a quantized weight")
    if (module.out_features, module.in_features) != (weight.outputs, weight.inputs):
        raise ValueError(
            f"{name} of {type(model).__name__} is [{module.out_features}, {module.in_features}], and its quantized weight is "
            f"[{weight.outputs}, {weight.inputs}]"
        )
    setattr(parent, own, QuantizedLinear(weight, module.bias).train(module.training))


def can_be_looked_up(weight: QuantizedWeight) -> bool:
    return weight.kind == "int8" and weight.shift is None


def replace_embedding(model: nn.Module, name: str, weight: QuantizedWeight) -> None:
    """Replace a table of embeddings by a quantized one; ValueError where there is none of that name and size, or such a weight does not fit."""
    parent_name, _, own = name.rpartition(".")
    table = dict(model.named_modules()).get(name)
    if type(table) is not nn.Embedding or table.weight.shape != (weight.outputs, weight.inputs):
        raise ValueError(
            f"{type(model).__name__} has no table of embeddings {name} for a quantized weight of [{weight.outputs}, {weight.inputs}]"
        )
    if not can_be_looked_up(weight):
        raise ValueError(f"{name} is a table of embeddings, which needs codes of int8 without a shift")
    setattr(model.get_submodule(parent_name), own, QuantizedEmbedding(weight, table.weight.dtype))


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
    found = {name: expert_weight(layer, name) for name in getattr(layer, _KINDS, {})}
    return {name: weight for name, weight in found.items() if isinstance(weight, QuantizedWeight)}


def plain_weights(layer: nn.Module) -> dict[str, nn.Parameter]:
    return {name: weight for name, weight in layer.named_parameters(recurse=False) if weight.dim() == 3}


def natural_shape(layer: Any, weight: Tensor) -> tuple[int, int, int]:
    """Return `[experts, outputs, inputs]` of a plain weight, in whichever order its dimensions lie."""
    experts, rows, columns = weight.shape
    return (experts, columns, rows) if layer.is_transposed else (experts, rows, columns)


def replace_weights(layer: Any, weights: Mapping[str, QuantizedWeight]) -> None:
    """Replace all plain weights of a layer of experts by quantized ones, in `[experts, outputs, inputs]`; ValueError for others."""
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
    forms = getattr(layer, _KINDS)
    setattr(layer, _KINDS, forms | {name: (forms[name][0], activations)})
