# SPDX-License-Identifier: Apache-2.0
"""All kernels by name, and the operators of steps that they may replace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ....config import NeuronConfig
from ....step.ops import StepOps
from ..operators.experts import InForm
from ..rank.packages import package_problem
from .attention_block_tkg import ATTENTION_BLOCK_TKG, attend_decodes
from .attention_cte import ATTENTION_CTE, attend_chunks
from .kernel import KERNELS
from .moe_tkg import MOE_TKG, compute_chosen


def with_kernels(ops: StepOps, names: Sequence[str]) -> StepOps:
    """Return operators with attention that calls these kernels where they compute what a layer does."""
    if ATTENTION_CTE.name in names:
        ops = replace(ops, attend_cache=attend_chunks(ops.attend_cache))
    if ATTENTION_BLOCK_TKG.name in names:
        assert ops.attend_decode is not None
        ops = replace(ops, attend_decode=attend_decodes(ops.attend_decode))
    return ops


def experts_with_kernels(compute: InForm, names: Sequence[str]) -> InForm:
    """Return experts that call these kernels where they compute what a layer does."""
    return compute_chosen(compute) if MOE_TKG.name in names else compute


def check_kernels(config: NeuronConfig) -> None:
    """Raise RuntimeError where the kernels of a config cannot be compiled here."""
    for name in config.kernels:
        for package in KERNELS[name].packages:
            problem = package_problem(package)
            if problem is not None:
                raise RuntimeError(f"the kernel {name} comes from the Neuron SDK: {problem}; or leave --kernels out")
