# SPDX-License-Identifier: Apache-2.0
"""Whether a target has the types of a model's quantized weights: a checkpoint may bring what no export would make for it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ...checkpoints.quantize.rounding import FP8_LARGEST_ON
from ...config import TARGETS_WITHOUT_FP8
from ...step.features.codes.expert_weights import quantized_weights
from ...step.features.codes.modules import QuantizedEmbedding, QuantizedLinear
from ...step.features.codes.weight import QuantizedWeight


def check_weight_types(model: nn.Module, target: str) -> None:
    """Raise ValueError where a target has no fp8, or no number as large as a code of the weights."""
    for name, weight in _quantized(model):
        if weight.kind != "fp8":
            continue
        if target in TARGETS_WITHOUT_FP8:
            raise ValueError(
                f"{name} has weights of fp8, a type that target={target!r} lacks; use target='trn2' or later, or pass "
                f"--dequantize (dequantize=True)"
            )
        limit = FP8_LARGEST_ON.get(target)
        largest = max(
            (float(each.float().abs().amax()) for each in weight.codes.flatten(0, -2).split(1024)), default=0.0
        )
        if limit is not None and not largest <= limit:
            raise ValueError(
                f"{name} has codes of fp8 up to {largest:g}, and the largest of target={target!r} is {limit:g}; use target='trn3', or pass "
                f"--dequantize (dequantize=True), with --quantization fp8 to round the weights anew"
            )


def _quantized(model: nn.Module) -> Iterator[tuple[str, QuantizedWeight]]:
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear | QuantizedEmbedding):
            yield name, module.quantized_weight
        for own, weight in quantized_weights(module).items():
            yield f"{name}.{own}", weight
