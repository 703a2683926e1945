# SPDX-License-Identifier: Apache-2.0
"""A call of a kernel as an operator of torch: a node of a traced graph, and run by its reference where it is executed."""

from __future__ import annotations

import torch
from torch import Tensor, library

from .kernel import KERNELS


@library.custom_op("optimum_neuron::kernel", mutates_args=())
def call_kernel(name: str, operands: list[Tensor]) -> list[Tensor]:
    """All that a kernel makes of its operands.

    Args:
        name: a key of `KERNELS`.
    """
    return KERNELS[name].results(operands)


@call_kernel.register_fake
def _(name: str, operands: list[Tensor]) -> list[Tensor]:
    return KERNELS[name].results(operands)


# The node of an exported graph.
KERNEL = torch.ops.optimum_neuron.kernel.default
