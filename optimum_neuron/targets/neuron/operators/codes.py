# SPDX-License-Identifier: Apache-2.0
"""Linear layers with quantized weights as an operator: a node of a traced graph, written out when that is lowered.

The written form reads codes and scales as they are stored for it: inputs first, and two codes in a byte are half a block of inputs apart
(`sharding.weights.FileWeight`), so that a step moves neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce

import torch
from torch import Tensor, library, nn

from ....checkpoints.quantize.rounding import FP8_LARGEST_ON
from ....step.features.codes.modules import (
    QuantizedEmbedding,
    QuantizedLinear,
    QuantizedProduct,
    dequantized_product,
    quantized_weights,
)
from ....step.features.codes.weight import INT4_MIDDLE, PACKED, QuantizedWeight


# From `[..., rows, n]` and `[..., n, columns]` of one type to `[..., rows, columns]` float32, of which no sum is rounded before.
WideProduct = Callable[[Tensor, Tensor], Tensor]


@library.custom_op("optimum_neuron::quantized_linear", mutates_args=())
def quantized_linear(
    x: Tensor, codes: Tensor, scale: Tensor, shift: Tensor | None, bias: Tensor | None, kind: str, tokens: int
) -> Tensor:
    """Compute a linear layer from x `[..., inputs]`, the parts of a `QuantizedWeight` and bias `[outputs]` to `[..., outputs]`.

    `tokens` are those of the step with the wanted form.
    """
    return dequantized_product(x, QuantizedWeight(kind, codes, scale, shift), bias)


@quantized_linear.register_fake
def _(x: Tensor, codes: Tensor, *_: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], codes.shape[0]))


# The node of an exported graph.
QUANTIZED_LINEAR = torch.ops.optimum_neuron.quantized_linear.default


def quantized_linear_like(like: int | None = None) -> QuantizedProduct:
    """Return the product with quantized weights in the form of a step of `like` tokens; None: of what a layer gets."""

    def multiply(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
        tokens = x.numel() // x.shape[-1] if like is None else like
        output: Tensor = QUANTIZED_LINEAR(x, weight.codes, weight.scale, weight.shift, bias, weight.kind, tokens)
        return output

    return multiply


@library.custom_op("optimum_neuron::quantized_experts", mutates_args=())
def quantized_experts(
    x: Tensor, codes: Tensor, scale: Tensor, shift: Tensor | None, index: Tensor | None, kind: str, tokens: int
) -> Tensor:
    """Multiply x `[blocks, rows, inputs]` by experts' weights, the parts of a `QuantizedWeight`, to `[blocks, rows, outputs]` float32.

    `index [blocks]` has the expert of each block; None: block e is expert e's. `tokens` are rows of the wanted form.
    """
    weight = QuantizedWeight(kind, codes, scale, shift).dequantize()
    return x.float() @ (weight if index is None else weight[index]).transpose(1, 2)


@quantized_experts.register_fake
def _(x: Tensor, codes: Tensor, *_: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], codes.shape[1]), dtype=torch.float32)


QUANTIZED_EXPERTS = torch.ops.optimum_neuron.quantized_experts.default


@library.custom_op("optimum_neuron::stored_product", mutates_args=())
def stored_product(x: Tensor, codes: Tensor, scale: Tensor, shift: Tensor | None, kind: str, tokens: int) -> Tensor:
    """Multiply x `[rows, inputs]` by a weight as it is stored, to `[rows, outputs]` float32.

    Codes are `[inputs, outputs]`, or half as many rows of bytes with two; scale and shift `[groups, outputs]`. All may have one more
    dimension in front.
    """
    return written_out(lambda left, right: left.float() @ right.float(), x, codes, scale, shift, kind, tokens)


@stored_product.register_fake
def _(x: Tensor, codes: Tensor, *_: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], codes.shape[-1]), dtype=torch.float32)


STORED_PRODUCT = torch.ops.optimum_neuron.stored_product.default


def written_out(
    dot: WideProduct, x: Tensor, codes: Tensor, scale: Tensor, shift: Tensor | None, kind: str, tokens: int
) -> Tensor:
    """Compute `stored_product` in elementary operators.

    Products of codes are exact in every type, and a scale of an output alone follows them. Where groups of inputs have scales, either each
    group's product is scaled and all are added in float32, or the weight itself is scaled before one product. Up to half a group's size of
    rows, the results of the first take no more memory than a copy of the weight in 16 bits. The second rounds a weight once to x's type, as
    transformers' dequantized weights. A shift is a product of its own, with the sums of the groups: nothing is added to a code.
    """
    groups = scale.shape[-2]
    scaled = groups > 1 and 2 * tokens > x.shape[-1] // groups
    products = []
    for inputs, values, scales in _split_parts(x, codes, scale.float(), kind, has_shift=shift is not None):
        if scaled:
            weight = (values.float() * scales[..., None, :]).to(x.dtype).flatten(-3, -2)
            products.append(dot(inputs.flatten(-2), weight))
        else:
            product = dot(inputs.transpose(-3, -2), values) * scales[..., None, :]
            products.append(product.squeeze(-3) if groups == 1 else product.sum(-3))
    if shift is not None:
        products.append(dot(x.float().unflatten(-1, (groups, -1)).sum(-1), shift))
    return reduce(torch.add, products)


def _split_parts(
    x: Tensor, codes: Tensor, scale: Tensor, kind: str, *, has_shift: bool
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield inputs `[rows, groups, n]`, values `[groups, n, outputs]` of x's type and scales `[groups, outputs]`; their products add up."""
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
    """Return the number of blocks with two halves that share bytes: a half is whole groups where it can be, else half of one."""
    return 1 if groups == 1 or groups % 2 == 0 else groups


def _half_values(codes: Tensor, half: int, kind: str, dtype: torch.dtype, *, has_shift: bool) -> tuple[Tensor, float]:
    """Return what the lower or upper four bits mean, times a number that the scales are divided by; all steps are exact.

    The upper bits stay in place, 16 times as large: torch-xla makes a shift a division, and a factor of 16-bit numbers a product in float32.
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


def check_weight_types(model: nn.Module, target: str) -> None:
    """Raise ValueError where a target has no number as large as a code of fp8 that a checkpoint's weights have."""
    for _, prefix, weight in list_quantized(model):
        name = prefix[:-1]
        limit, parts = FP8_LARGEST_ON.get(target), weight.codes.flatten(0, -2).split(1024)
        if limit is None or weight.kind != "fp8":
            continue
        largest = max((float(each.float().abs().amax()) for each in parts), default=0.0)
        if not largest <= limit:
            raise ValueError(
                f"{name} has codes of fp8 up to {largest:g}, and the largest of target={target!r} is {limit:g}; use target='trn3', or pass "
                f"--dequantize (dequantize=True), with --quantization fp8 to round the weights again"
            )


def list_quantized(model: nn.Module) -> Iterator[tuple[str, str, QuantizedWeight]]:
    """Yield quantized weights, each after the name of its plain tensor and the beginning of its own names."""
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear | QuantizedEmbedding):
            yield f"{name}.weight", f"{name}.", module.quantized_weight
        for own, weight in quantized_weights(module).items():
            yield f"{name}.{own}", f"{name}.{own}_", weight
