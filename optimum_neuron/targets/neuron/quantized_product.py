# SPDX-License-Identifier: Apache-2.0
"""Linear layers with quantized weights as an operator: a node of a traced graph, written out when that is lowered.

What is written out reads codes and scales as they are stored for it: inputs first, and of two codes in a byte the second one of an input
half a block behind that of the first (`weight_layout.StoredWeight`), so that neither is moved in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, library

from ...step.features.codes.modules import QuantizedProduct, dequantized_product
from ...step.features.codes.weight import INT4_MIDDLE, PACKED, QuantizedWeight


# From `[..., rows, n]` and `[..., n, columns]` of one type to `[..., rows, columns]` float32, of which no sum is rounded before.
WideProduct = Callable[[Tensor, Tensor], Tensor]


@library.custom_op("optimum_neuron::quantized_linear", mutates_args=())
def quantized_linear(
    x: Tensor, codes: Tensor, scale: Tensor, shift: Tensor | None, bias: Tensor | None, kind: str, tokens: int
) -> Tensor:
    """A linear layer: x `[..., inputs]`, the parts of a `QuantizedWeight`, bias `[outputs]`.

    Args:
        tokens: of the step whose form is to be had.

    Returns:
        `[..., outputs]` of x's type.
    """
    return dequantized_product(x, QuantizedWeight(kind, codes, scale, shift), bias)


@quantized_linear.register_fake
def _(
    x: Tensor, codes: Tensor, scale: Tensor, shift: Tensor | None, bias: Tensor | None, kind: str, tokens: int
) -> Tensor:
    return x.new_empty((*x.shape[:-1], codes.shape[0]))


# The node of an exported graph.
QUANTIZED_LINEAR = torch.ops.optimum_neuron.quantized_linear.default


def quantized_linear_like(like: int | None = None) -> QuantizedProduct:
    """How graphs multiply by quantized weights.

    Args:
        like: in the form of a step of so many tokens; None: of what a layer gets.
    """

    def multiply(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
        tokens = x.numel() // x.shape[-1] if like is None else like
        output: Tensor = QUANTIZED_LINEAR(x, weight.codes, weight.scale, weight.shift, bias, weight.kind, tokens)
        return output

    return multiply


@library.custom_op("optimum_neuron::quantized_experts", mutates_args=())
def quantized_experts(
    x: Tensor, codes: Tensor, scale: Tensor, shift: Tensor | None, index: Tensor | None, kind: str, tokens: int
) -> Tensor:
    """Products of x `[blocks, rows, inputs]` with the weights of experts, which are the parts of a `QuantizedWeight`.

    Args:
        index: `[blocks]`, the expert of each block; None: block e is expert e's.
        tokens: rows whose form is to be had.

    Returns:
        `[blocks, rows, outputs]` float32.
    """
    weight = QuantizedWeight(kind, codes, scale, shift).dequantize()
    return x.float() @ (weight if index is None else weight[index]).transpose(1, 2)


@quantized_experts.register_fake
def _(
    x: Tensor, codes: Tensor, scale: Tensor, shift: Tensor | None, index: Tensor | None, kind: str, tokens: int
) -> Tensor:
    return x.new_empty((*x.shape[:-1], codes.shape[1]), dtype=torch.float32)


QUANTIZED_EXPERTS = torch.ops.optimum_neuron.quantized_experts.default


@library.custom_op("optimum_neuron::stored_product", mutates_args=())
def stored_product(x: Tensor, codes: Tensor, scale: Tensor, shift: Tensor | None, kind: str, tokens: int) -> Tensor:
    """The product of x `[rows, inputs]` and a weight as it is stored: codes `[inputs, outputs]`, of two in a byte half as many rows;
    scale and shift `[groups, outputs]`. Or as many as all of them have in a first dimension.

    Returns:
        `[rows, outputs]` float32.
    """
    return written_out(lambda left, right: left.float() @ right.float(), x, codes, scale, shift, kind, tokens)


@stored_product.register_fake
def _(x: Tensor, codes: Tensor, scale: Tensor, shift: Tensor | None, kind: str, tokens: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], codes.shape[-1]), dtype=torch.float32)


STORED_PRODUCT = torch.ops.optimum_neuron.stored_product.default


def written_out(
    dot: WideProduct, x: Tensor, codes: Tensor, scale: Tensor, shift: Tensor | None, kind: str, tokens: int
) -> Tensor:
    """What `stored_product` computes, in elementary operators.

    Codes are whole in every type, so products of them are exact, and a scale that belongs to an output alone follows them. Where
    groups of inputs have scales, either each group's product is scaled, and all are added in float32, or the weight itself is, before
    one product. The first makes rows * groups * outputs numbers of 4 bytes, the second inputs * outputs of x's type: up to half a
    group's size of rows the first ones take no more memory than a copy of the weight in 16 bits, and beyond they outgrow it with
    every row (of 512 rows and groups of 32, 32 times). The second rounds a weight once to x's type, as transformers has one that was
    dequantized; in float32 that is exact. A shift is a product of its own, with the sums of the groups: nothing is added to a code.
    """
    groups = scale.shape[-2]
    scaled = groups > 1 and 2 * tokens > x.shape[-1] // groups
    total: Tensor | None = None
    for inputs, values, scales in _parts(x, codes, scale.float(), kind, has_shift=shift is not None):
        if scaled:
            weight = (values.float() * scales[..., None, :]).to(x.dtype).flatten(-3, -2)
            product = dot(inputs.flatten(-2), weight)
        else:
            product = dot(inputs.transpose(-3, -2), values) * scales[..., None, :]
            product = product.squeeze(-3) if groups == 1 else product.sum(-3)
        total = product if total is None else total + product
    assert total is not None
    if shift is None:
        return total
    return total + dot(x.float().unflatten(-1, (groups, -1)).sum(-1), shift)


def _parts(
    x: Tensor, codes: Tensor, scale: Tensor, kind: str, *, has_shift: bool
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Inputs `[rows, groups, n]`, values `[groups, n, outputs]` of x's type and scales `[groups, outputs]`, whose products add up."""
    groups = scale.shape[-2]
    if kind not in PACKED:
        yield x.unflatten(-1, (groups, -1)), codes.to(x.dtype).unflatten(-2, (groups, -1)), scale
        return
    blocks = blocks_of(groups)
    by_half = x.unflatten(-1, (blocks, 2, -1))
    for half in range(2):
        inputs = by_half.select(-2, half).flatten(-2)
        values, factor = _half_values(codes, half, kind, x.dtype, has_shift=has_shift)
        own = scale.unflatten(-2, (2, -1)).select(-3, half) if blocks == 1 and groups > 1 else scale
        count = own.shape[-2]
        yield inputs.unflatten(-1, (count, -1)), values.unflatten(-2, (count, -1)), own * (1 / factor)


def blocks_of(groups: int) -> int:
    """Into how many blocks inputs are cut whose halves share bytes: a half is whole groups where it can be, else half of one."""
    return 1 if groups == 1 or groups % 2 == 0 else groups


def _half_values(codes: Tensor, half: int, kind: str, dtype: torch.dtype, *, has_shift: bool) -> tuple[Tensor, float]:
    """What the lower or upper four bits stand for, times a number that the scales are divided by; all steps are exact.

    The upper bits stay where they are, 16 times as large: torch-xla makes a shift a division, and a factor of 16-bit numbers a product in
    float32.
    """
    unit = 16 if half else 1
    numbers = (codes & (15 * unit)).to(dtype)
    if kind == "fp4":
        is_negative = numbers >= 8 * unit
        sizes = torch.where(is_negative, numbers - 8 * unit, numbers)
        # Twice the three slopes of e2m1: 0 to 2 in halves, 2 to 4 in ones, 4 to 6 in twos.
        twice = sizes + sizes
        values = torch.maximum(torch.maximum(sizes, twice - 4 * unit), twice + twice - 16 * unit)
        return torch.where(is_negative, -values, values), 2.0 * unit
    return numbers if has_shift else numbers - INT4_MIDDLE * unit, unit
