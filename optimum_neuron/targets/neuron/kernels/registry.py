# SPDX-License-Identifier: Apache-2.0
"""All kernels by name, and the operators of steps in which some of them stand for others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ....config import NeuronConfig
from ....graphs.ops import StepOps
from ..rank.packages import package_problem
from .attention_cte import ATTENTION_CTE, attend_chunks
from .kernel import KERNELS as KERNELS


def with_kernels(ops: StepOps, names: Sequence[str]) -> StepOps:
    """Operators that call these kernels where a layer is of a kind that they compute."""
    return replace(ops, attend_cache=attend_chunks(ops.attend_cache)) if ATTENTION_CTE.name in names else ops


def check_kernels(config: NeuronConfig) -> None:
    """Raises RuntimeError where the kernels of a config cannot be compiled here."""
    for name in config.kernels:
        for package in KERNELS[name].packages:
            problem = package_problem(package)
            if problem is not None:
                raise RuntimeError(f"the kernel {name} is of the Neuron SDK: {problem}; or leave --kernels out")
