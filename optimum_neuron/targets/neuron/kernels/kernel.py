# SPDX-License-Identifier: Apache-2.0
"""What a kernel is, as data. Nothing here imports one: whether the SDK has it is asked of its files, where graphs are compiled."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..rank.packages import Package


# The compiler of kernels, and AWS's library of them (github.com/aws-neuron/nki-library).
NKI = Package("nki", "nki", "framework")
NKI_LIBRARY = Package("nkilib", "nki-library", "core")


# What a call of a kernel names in HLO, until a compiler's own call takes its place; the kernel is its backend_config.
KERNEL_CALL = "optimum_neuron.kernel"


@dataclass(frozen=True)
class Choice:
    """A member of an enumeration of a package, by name, since packages are imported where graphs are compiled alone."""

    module: str
    enumeration: str
    member: str

    def value(self) -> Any:
        return getattr(getattr(importlib.import_module(self.module), self.enumeration), self.member)


@dataclass(frozen=True)
class Kernel:
    """A function of a package that stands for an operator.

    Attributes:
        name: in NeuronConfig, in graphs and in messages.
        module, function: where it is.
        packages: that have to be installed where graphs are compiled.
        operands: the function's parameters that are tensors, in the order in which a graph passes them.
        arguments: its other parameters, which are known when it is compiled.
        reference: the same in torch, from the same operands: the contract that a graph relies on. It makes a tensor, or as
            many as the function does, of shapes that follow from theirs, and uses all of them.
    """

    name: str
    module: str
    function: str
    packages: tuple[Package, ...]
    operands: tuple[str, ...]
    arguments: Mapping[str, Any]
    reference: Callable[..., Tensor | tuple[Tensor, ...]]

    def results(self, operands: Sequence[Tensor]) -> list[Tensor]:
        """What the reference makes."""
        made = self.reference(*operands)
        return [made] if isinstance(made, Tensor) else list(made)


# All of them by name; registry.py has them known.
KERNELS: dict[str, Kernel] = {}


def known(kernel: Kernel) -> Kernel:
    """The kernel, which calls may name from then on."""
    KERNELS[kernel.name] = kernel
    return kernel
