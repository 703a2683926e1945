# SPDX-License-Identifier: Apache-2.0
"""Modules with quantized weights: linear layers with a product that the step chooses, and tables of embeddings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...serving import set_within
from .weight import CODE_DTYPES, PACKED, QuantizedWeight, integer_product


_PARTS = ("codes", "scale", "shift")
# From `x [..., inputs]`, a weight and `bias [outputs]` to `[..., outputs]` of x's type.
QuantizedProduct = Callable[[Tensor, QuantizedWeight, Tensor | None], Tensor]


def dequantized_product(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Compute transformers' linear layer with the dequantized weight, in float32, rounded once to x's type."""
    rows, results = x.float(), []
    for (place,), part in weight.parts():
        wide = None if bias is None else bias[place].float()
        results.append(nn.functional.linear(rows, part.dequantize(), wide).to(x.dtype))
    return results[0] if len(results) == 1 else torch.cat(results, -1)


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
    """A linear layer with a quantized weight `[outputs, inputs]` and a plain bias. Code that reads its `weight` gets an error, not codes."""

    codes: Tensor
    scale: Tensor
    shift: Tensor | None
    bias: nn.Parameter | None

    def __init__(self, weight: QuantizedWeight, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.kind, self.activations = weight.kind, weight.activations
        self.in_features, self.out_features = weight.inputs, weight.outputs
        for name in _PARTS:
            self.register_buffer(name, getattr(weight, name))
        self.register_parameter("bias", bias)

    @property
    def quantized_weight(self) -> QuantizedWeight:
        return QuantizedWeight(self.kind, self.codes, self.scale, self.shift, self.activations)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return _product.get()(x, self.quantized_weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.bias)


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


def can_be_looked_up(weight: QuantizedWeight) -> bool:
    return weight.kind == "int8" and weight.shift is None


def replace_module(model: nn.Module, name: str, weight: QuantizedWeight) -> None:
    """Replace a linear layer, with the same bias, or a table of embeddings by a quantized one.

    Raises:
        ValueError: there is none of that name and size, or a table would get other codes than int8 without a shift.
    """
    parent_name, _, own = name.rpartition(".")
    try:
        parent, module = model.get_submodule(parent_name), model.get_submodule(name)
    except AttributeError:
        parent, module = model, None
    if not isinstance(module, nn.Linear) and type(module) is not nn.Embedding:
        raise ValueError(f"{type(model).__name__} has no linear layer or table {name} for a quantized weight")
    if module.weight.shape != (weight.outputs, weight.inputs):
        raise ValueError(
            f"{name} of {type(model).__name__} is {list(module.weight.shape)}, and its quantized weight is "
            f"[{weight.outputs}, {weight.inputs}]"
        )
    if isinstance(module, nn.Linear):
        setattr(parent, own, QuantizedLinear(weight, module.bias).train(module.training))
    elif can_be_looked_up(weight):
        setattr(parent, own, QuantizedEmbedding(weight, module.weight.dtype))
    else:
        raise ValueError(f"{name} is a table of embeddings, which needs codes of int8 without a shift")


# Of each quantized weight by name, its kind and what activations are rounded to.
_KINDS = "_quantized_kinds"


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
    weights = {name: expert_weight(layer, name) for name in getattr(layer, _KINDS, {})}
    return {name: weight for name, weight in weights.items() if isinstance(weight, QuantizedWeight)}


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


@dataclass(frozen=True)
class WeightFormat:
    """The form of a layer's weight, but for its size: its kind, groups of inputs with a scale each, the name of the type of scales."""

    kind: str
    groups: int
    scale: str
    has_shift: bool
    activations: str | None = None

    @classmethod
    def describe(cls, weight: QuantizedWeight) -> WeightFormat:
        scale = str(weight.scale.dtype).removeprefix("torch.")
        return cls(weight.kind, weight.scale.shape[-1], scale, weight.shift is not None, weight.activations)

    def empty(self, *shape: int) -> QuantizedWeight:
        """Return a weight of this form and a shape `[..., outputs, inputs]`, to be filled; raise ValueError where none has it."""
        *others, outputs, inputs = shape
        if self.kind in PACKED and inputs % 2:
            raise ValueError(f"{self.kind} holds two codes in a byte, and an output has {inputs} inputs")
        columns = inputs // 2 if self.kind in PACKED else inputs
        scales = (*others, outputs, self.groups)
        return QuantizedWeight(
            self.kind,
            torch.empty((*others, outputs, columns), dtype=CODE_DTYPES[self.kind]),
            torch.empty(scales, dtype=getattr(torch, self.scale)),
            torch.empty(scales) if self.has_shift else None,
            self.activations,
        )


def weight_formats(model: nn.Module) -> dict[str, WeightFormat]:
    """Return the forms of a model's quantized weights, by the names of linear layers, tables of embeddings, and parameters of experts."""
    weights = {}
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear | QuantizedEmbedding):
            weights[name] = module.quantized_weight
        weights |= {f"{name}.{own}": weight for own, weight in quantized_weights(module).items()}
    return {name: WeightFormat.describe(weight) for name, weight in weights.items()}


def coded_tensors(model: nn.Module) -> set[str]:
    found = set()
    for name, module in model.named_modules():
        prefixes = [f"{name}.{own}_" for own in quantized_weights(module)]
        if isinstance(module, QuantizedLinear | QuantizedEmbedding):
            prefixes.append(f"{name}.")
        found |= {f"{prefix}{part}" for prefix in prefixes for part in ("codes", "scale", "shift")}
    return found


def make_room(model: nn.Module, formats: Mapping[str, WeightFormat]) -> None:
    """Replace a model's weights by quantized ones, to be filled, on torch's default device; raise ValueError where it has none such."""
    modules = dict(model.named_modules())
    of_experts: dict[str, dict[str, QuantizedWeight]] = defaultdict(dict)
    for name, form in formats.items():
        module, (layer_name, _, own) = modules.get(name), name.rpartition(".")
        layer = modules.get(layer_name)
        if isinstance(module, nn.Linear | nn.Embedding):
            replace_module(model, name, form.empty(*module.weight.shape))
        elif layer is not None and is_experts(layer) and own in plain_weights(layer):
            of_experts[layer_name][own] = form.empty(*natural_shape(layer, plain_weights(layer)[own]))
        else:
            raise ValueError(
                f"{type(model).__name__} has no linear layer, table or experts {name} for a quantized weight"
            )
    for name, weights in of_experts.items():
        replace_weights(modules[name], weights)
