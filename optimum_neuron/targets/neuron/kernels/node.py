# SPDX-License-Identifier: Apache-2.0
"""A call of a kernel as an operator of torch: a node of a traced graph, and run by its reference where it is executed."""

from __future__ import annotations

import torch
from torch import Tensor, library

from .kernel import KERNELS


@library.custom_op("optimum_neuron::kernel", mutates_args=())
def call_kernel(name: str, operands: list[Tensor]) -> Tensor:
    """What a kernel makes of its operands.

    Args:
        name: a key of `KERNELS`.
    """
    return _reference(name, operands)


@call_kernel.register_fake
def _(name: str, operands: list[Tensor]) -> Tensor:
    return _reference(name, operands)


def _reference(name: str, operands: list[Tensor]) -> Tensor:
    return KERNELS[name].reference(*operands)


# The node of an exported graph.
KERNEL = torch.ops.optimum_neuron.kernel.default
