# SPDX-License-Identifier: Apache-2.0
"""Short scales of int4 codes: times any code they are numbers of bfloat16, so kernels that compute in it need not scale sums."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from ..steps.steps import Experts, Linears, PlanData


# Bits of float16 that are 0 in a scale of 5 significant bits, as step/features/codes/weight.py rounds scales.
UNUSED_SCALE_BITS = 63


def are_short(scale: np.ndarray) -> bool:
    """Return whether all scales of a tensor are finite numbers of float16 and short."""
    if scale.dtype != np.float16:
        return False
    return not (scale.view(np.int16) & UNUSED_SCALE_BITS).any() and bool(np.isfinite(scale).all())


def find_short_scales(plans: Iterable[PlanData], tensors: Mapping[str, np.ndarray]) -> frozenset[str]:
    """Return the names of the tensors that plans take scales from and in which all are short.

    All plans share them: the products that a plan takes depend on weights alone.
    """
    scales = (
        plan.buffers[layer.codes.scale.buffer]
        for plan in plans
        for step in plan.steps
        if isinstance(step, Linears | Experts) and step.x.dtype == "bfloat16"
        for layer in (step.layers if isinstance(step, Linears) else (step,))
        if layer.codes is not None and layer.codes.can_be_short
    )
    names = {each.name for each in scales if each.kind == "tensor"}
    return frozenset(name for name in names if name in tensors and are_short(tensors[name]))
