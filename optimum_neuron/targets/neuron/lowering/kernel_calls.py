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
from ..kernels.kernel import KERNEL_CALL, KERNELS
from . import passes
from .decompositions import decompose
from .xla_trace import trace


class _ReferenceModule(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def forward(self, *operands: Tensor) -> tuple[Tensor, ...]:
        return (KERNELS[self._name].reference(*operands),)


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
            examples = tuple(torch.zeros(shape, dtype=getattr(torch, dtype)) for shape, dtype in operands)
            with torch.no_grad():
                program = decompose(torch.export.export(_ReferenceModule(name), examples, strict=False))
            reference, numbers, constants = trace(program, 1)
            passes.inline_constants(reference, constants)
            for parameter in hlo.parameters(reference):
                parameter.parameter_number = numbers.index(parameter.parameter_number)
            entry = hlo.entry(reference)
            (entry.root_id,) = hlo.find_root(entry).operand_ids  # its only result, not a tuple of it
            added[key] = _merge_module(module, reference)
        call.called_computation_ids.append(added[key])


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
    if KERNEL_CALL.encode() not in data:
        return data
    module = hlo.parse(data)
    for call, _ in list(kernel_calls(module)):
        call.opcode = "call"
        call.ClearField("custom_call_target")
        call.ClearField("backend_config")
    return hlo.serialize(module)


def without_references(module: Any) -> Any:
    """Drop references in place, and return the module as a compiler gets it."""
    calls = list(kernel_calls(module))
    for call, _ in calls:
        call.ClearField("called_computation_ids")
    if calls:
        passes.remove_unused(module)
    return module
