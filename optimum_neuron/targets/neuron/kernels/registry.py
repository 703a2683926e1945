# SPDX-License-Identifier: Apache-2.0
"""All kernels by name."""

from __future__ import annotations

from ....config import NeuronConfig
from ..rank.packages import package_problem
from .attention import ATTENTION_BLOCK_TKG, ATTENTION_CTE
from .kernel import KERNELS
from .moe_tkg import MOE_TKG


__all__ = ["ATTENTION_BLOCK_TKG", "ATTENTION_CTE", "KERNELS", "MOE_TKG", "check_kernels"]


def check_kernels(config: NeuronConfig) -> None:
    """Raise RuntimeError where the kernels of a config cannot be compiled here."""
    for name in config.kernels:
        for package in KERNELS[name].packages:
            problem = package_problem(package)
            if problem is not None:
                raise RuntimeError(f"the kernel {name} comes from the Neuron SDK: {problem}; or leave --kernels out")
