# SPDX-License-Identifier: Apache-2.0
"""Kernels as data, and their calls as nodes of a graph. Nothing here imports one: an export looks for the SDK's files."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, library

from ..rank.packages import Package


# The compiler of kernels, and AWS's library of them (github.com/aws-neuron/nki-library).
NKI = Package("nki", "nki", "framework")
NKI_LIBRARY = Package("nkilib", "nki-library", "core")


# What a call of a kernel names in HLO, until a compiler's own call takes its place; the kernel is its backend_config.
KERNEL_CALL = "optimum_neuron.kernel"


@dataclass(frozen=True)
class EnumMember:
    """A member of an enumeration of a package, by name: packages are imported only where graphs are compiled."""

    module: str
    enumeration: str
    member: str

    def value(self) -> Any:
        return getattr(getattr(importlib.import_module(self.module), self.enumeration), self.member)


@dataclass(frozen=True)
class Kernel:
    """A function of a package that replaces an operator."""

    name: str  # in NeuronConfig, in graphs and in messages
    module: str
    function: str
    packages: tuple[Package, ...]  # to install where graphs are compiled
    operands: tuple[str, ...]  # the function's parameters that are tensors, in the order in which a graph passes them
    arguments: Mapping[str, Any]  # its other parameters, known at compile time
    # The same in torch, the contract that a graph relies on. It uses all operands and returns the function's results.
    reference: Callable[..., Tensor | tuple[Tensor, ...]]

    def results(self, operands: Sequence[Tensor]) -> list[Tensor]:
        made = self.reference(*operands)
        return [made] if isinstance(made, Tensor) else list(made)


# All of them by name; registry.py has them known.
KERNELS: dict[str, Kernel] = {}


def register(kernel: Kernel) -> Kernel:
    KERNELS[kernel.name] = kernel
    return kernel


@library.custom_op("optimum_neuron::kernel", mutates_args=())
def call_kernel(name: str, operands: list[Tensor]) -> list[Tensor]:
    """Return all that a kernel makes of its operands; `name` is a key of `KERNELS`."""
    return KERNELS[name].results(operands)


@call_kernel.register_fake
def _(name: str, operands: list[Tensor]) -> list[Tensor]:
    return KERNELS[name].results(operands)


# The node of an exported graph.
KERNEL = torch.ops.optimum_neuron.kernel.default
