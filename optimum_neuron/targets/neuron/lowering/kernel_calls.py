# SPDX-License-Identifier: Apache-2.0
"""Calls of kernels in an HLO module: custom calls, each with a reference computation.

A module says what the compiler is to call, and what that has to compute: `by_reference` is executed, `without_references` compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..graphs import hlo
from ..kernels.kernel import KERNEL_CALL
from ..kernels.registry import KERNELS
from . import passes
from .decompositions import decompose
from .xla_trace import trace


class _ReferenceModule(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def forward(self, *operands: Tensor) -> tuple[Tensor, ...]:
        return tuple(KERNELS[self._name].results(operands))


def kernel_calls(module: Any) -> Iterator[tuple[Any, str]]:
    for _, each in hlo.instructions(module):
        if each.opcode == "custom-call" and each.custom_call_target == KERNEL_CALL:
            yield each, each.backend_config.decode()


def called_kernels(data: bytes) -> set[str]:
    return {name for _, name in kernel_calls(hlo.parse(data))} if KERNEL_CALL.encode() in data else set()


def add_references(module: Any) -> None:
    """Add the reference computations of a module's kernel calls; equal calls share one."""
    by_id = {each.id: each for _, each in hlo.instructions(module)}
    added: dict[tuple[Any, ...], int] = {}
    for call, name in kernel_calls(module):
        operands = tuple(hlo.array(by_id[operand].shape) for operand in call.operand_ids)
        key = (name, *operands)
        if key not in added:
            reference = _trace_reference(name, operands)
            entry = hlo.entry(reference)
            root = hlo.find_root(entry)
            if root.opcode == "tuple" and not call.shape.tuple_shapes:  # its only result, not a tuple of it
                (entry.root_id,) = root.operand_ids
            added[key] = _merge_module(module, reference)
        call.called_computation_ids.append(added[key])


def _trace_reference(name: str, operands: tuple[tuple[tuple[int, ...], str], ...]) -> Any:
    examples = tuple(torch.zeros(shape, dtype=getattr(torch, dtype)) for shape, dtype in operands)
    with torch.no_grad():
        program = decompose(torch.export.export(_ReferenceModule(name), examples, strict=False))
    module, numbers, constants = trace(program, 1)
    if min(numbers) < 0:
        raise ValueError(f"the reference of the kernel {name} does not use all of its operands")
    passes.inline_constants(module, constants)
    for parameter in hlo.parameters(module):
        parameter.parameter_number = numbers.index(parameter.parameter_number)
    return module


def _merge_module(module: Any, other: Any) -> int:
    """Put the computations of another module before those of this one, and return the id of its entry there."""
    shift = 1 + max(hlo.all_ids(module)) + max(hlo.all_ids(other))
    for computation in other.computations:
        computation.id, computation.root_id = computation.id + shift, computation.root_id + shift
        for each in computation.instructions:
            each.id += shift
            for field in (each.operand_ids, each.control_predecessor_ids, each.called_computation_ids):
                field[:] = [old + shift for old in field]
    hlo.replace_items(module.computations, [*other.computations, *module.computations])
    return int(other.entry_computation_id) + shift


def by_reference(data: bytes) -> bytes:
    """Return a module that calls references in place of kernels, so that any XLA executes it."""
    module = hlo.parse(data)
    calls = list(kernel_calls(module))
    for call, _ in calls:
        call.opcode = "call"
        call.ClearField("custom_call_target")
        call.ClearField("backend_config")
    return hlo.serialize(module) if calls else data


def without_references(module: Any) -> Any:
    """Drop references in place, and return the module as a compiler gets it."""
    calls = list(kernel_calls(module))
    for call, _ in calls:
        call.ClearField("called_computation_ids")
    if calls:
        passes.remove_unused(module)
    return module
