# SPDX-License-Identifier: Apache-2.0
"""Layers with quantized weights, in place of a model's linear layers: whose product they call, and what is known of them as data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .weight import CODE_DTYPES, PACKED, QuantizedWeight


# From `x [..., inputs]`, a weight and `bias [outputs]` to `[..., outputs]` of x's type.
QuantizedProduct = Callable[[Tensor, QuantizedWeight, Tensor | None], Tensor]


@dataclass(frozen=True)
class WeightFormat:
    """How a layer's weight is stored, but for its size.

    Attributes:
        kind: of `QuantizedWeight`.
        groups: groups of inputs, each with a scale of its own.
        scale: torch's name of the type of scales.
        has_shift: whether values are not symmetric.
    """

    kind: str
    groups: int
    scale: str
    has_shift: bool

    @classmethod
    def of(cls, weight: QuantizedWeight) -> WeightFormat:
        scale = str(weight.scale.dtype).removeprefix("torch.")
        return cls(weight.kind, weight.scale.shape[-1], scale, weight.shift is not None)

    def empty(self, *shape: int) -> QuantizedWeight:
        """A weight of this form and a shape `[..., outputs, inputs]`, to be filled.

        Raises:
            ValueError: no such weight has this shape.
        """
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
        )


def dequantized_product(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """The reference: transformers' linear layer with the dequantized weight, in float32, rounded once to x's type."""
    wide = None if bias is None else bias.float()
    return nn.functional.linear(x.float(), weight.dequantize(), wide).to(x.dtype)


_product: ContextVar[QuantizedProduct] = ContextVar("how quantized layers multiply", default=dequantized_product)


@contextmanager
def multiplying(product: QuantizedProduct) -> Iterator[None]:
    """By which function the quantized layers of a model that runs within it compute."""
    token = _product.set(product)
    try:
        yield
    finally:
        _product.reset(token)


class QuantizedLinear(nn.Module):
    """A linear layer whose weight is quantized. It has no `weight`: code that reads one itself gets an error, not codes.

    Args:
        weight: `[outputs, inputs]`.
        bias: `[outputs]`, plain.
    """

    codes: Tensor
    scale: Tensor
    shift: Tensor | None
    bias: nn.Parameter | None

    def __init__(self, weight: QuantizedWeight, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.kind = weight.kind
        self.in_features, self.out_features = weight.inputs, weight.outputs
        for name in ("codes", "scale", "shift"):
            self.register_buffer(name, getattr(weight, name))
        self.register_parameter("bias", bias)

    @property
    def quantized_weight(self) -> QuantizedWeight:
        return QuantizedWeight(self.kind, self.codes, self.scale, self.shift)

    def forward(self, x: Tensor) -> Tensor:
        return _product.get()(x, self.quantized_weight, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, kind={self.kind}"


def weight_formats(model: nn.Module) -> dict[str, WeightFormat]:
    """The quantized layers of a model by name."""
    return {
        name: WeightFormat.of(module.quantized_weight)
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLinear)
    }


def replace_linear(model: nn.Module, name: str, weight: QuantizedWeight) -> None:
    """Puts a quantized layer where a model has a linear one, with the bias of that.

    Raises:
        ValueError: there is none of that name and size.
    """
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


def make_room(model: nn.Module, formats: Mapping[str, WeightFormat]) -> None:
    """Replaces linear layers by quantized ones, to be filled, on the device that torch makes tensors on.

    Raises:
        ValueError: the model has no such layers.
    """
    for name, each in formats.items():
        found = dict(model.named_modules()).get(name)
        if not isinstance(found, nn.Linear):
            raise ValueError(f"{type(model).__name__} has no linear layer {name} for a quantized weight")
        replace_linear(model, name, each.empty(found.out_features, found.in_features))
