# SPDX-License-Identifier: Apache-2.0
"""Scales of codes of int4 that are short: times any code, they are numbers of bfloat16, and kernels that compute in it need not scale sums."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ...step.features.codes.weight import UNUSED_SCALE_BITS
from ..plan.program import Codes, Experts, Linears, Plan


def can_be_short(codes: Codes) -> bool:
    unrounded = codes.shift is None and codes.activations is None
    return codes.kind == "int4" and unrounded and codes.scale.dtype == "float16"


def are_short(scale: Tensor) -> bool:
    """Whether all scales of a tensor are finite numbers of float16 and short."""
    if scale.dtype != torch.float16:
        return False
    return bool(((scale.view(torch.int16) & UNUSED_SCALE_BITS) == 0).all()) and bool(scale.isfinite().all())


def short_scales(plans: Iterable[Plan], tensors: Mapping[str, Tensor]) -> frozenset[str]:
    """Names of the tensors that plans take scales from and in which all are short: which products are taken depends on weights alone."""
    names = set()
    for plan in plans:
        for step in plan.steps:
            if not isinstance(step, Linears | Experts) or step.x.dtype != "bfloat16":
                continue
            for layer in step.layers if isinstance(step, Linears) else (step,):
                if layer.codes is not None and can_be_short(layer.codes):
                    buffer = plan.buffers[layer.codes.scale.buffer]
                    names |= {buffer.name} if buffer.kind == "tensor" else set()
    return frozenset(name for name in names if name in tensors and are_short(tensors[name]))
