# SPDX-License-Identifier: Apache-2.0
"""Kernels as data, and their calls as nodes of a graph. Nothing here imports one: an export looks for the SDK's files."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, library

from ....config import NeuronConfig
from ..rank.packages import Package, package_problem


# The compiler of kernels, and AWS's library of them (github.com/aws-neuron/nki-library), to install where graphs are compiled.
KERNEL_PACKAGES = (Package("nki", "nki", "framework"), Package("nkilib", "nki-library", "core"))
# The name of a kernel's call in HLO, until a compiler's own call takes its place; the kernel is its backend_config.
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

    name: str  # of the function, as in NeuronConfig, in graphs and in messages
    module: str
    operands: tuple[str, ...]  # the function's parameters that are tensors, in the order in which a graph passes them
    arguments: Mapping[str, Any]  # its other parameters, known at compile time
    # The same in torch, the contract that a graph relies on. It uses all operands, and returns the function's one result.
    reference: Callable[..., Tensor]


# All of them by name.
KERNELS: dict[str, Kernel] = {}


def register(kernel: Kernel) -> Kernel:
    KERNELS[kernel.name] = kernel
    return kernel


def check_kernels(config: NeuronConfig) -> None:
    """Raise RuntimeError where the kernels of a config cannot be compiled here."""
    problem = next(filter(None, map(package_problem, KERNEL_PACKAGES if config.kernels else ())), None)
    if problem is not None:
        name = config.kernels[0]
        raise RuntimeError(f"the kernel {name} comes from the Neuron SDK: {problem}; or leave --kernels out")


@library.custom_op("optimum_neuron::kernel", mutates_args=())
def call_kernel(name: str, operands: list[Tensor]) -> Tensor:
    """Return what a kernel makes of its operands; `name` is a key of `KERNELS`."""
    return KERNELS[name].reference(*operands)


@call_kernel.register_fake
def _(name: str, operands: list[Tensor]) -> Tensor:
    return KERNELS[name].reference(*operands)


# The node of an exported graph.
KERNEL = torch.ops.optimum_neuron.kernel.default
