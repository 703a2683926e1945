# SPDX-License-Identifier: Apache-2.0
"""Passes that give an HLO module its final form: nothing unused, and names, ids and aliases that follow from its contents."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..graphs import hlo


# A scope that torch-xla pushed ends with a number of its own.
_SCOPE_NUMBER = re.compile(r"\.\d+(?=/)")


def remove_unused(module: Any) -> None:
    """Remove instructions that no result needs, parameters included, and computations that nothing calls."""
    pending, called = [module.entry_computation_id], set()
    by_id = {computation.id: computation for computation in module.computations}
    while pending:
        computation = by_id[pending.pop()]
        if computation.id in called:
            continue
        called.add(computation.id)
        is_entry = computation.id == module.entry_computation_id
        needed = _find_needed(computation)
        kept = [each for each in computation.instructions if each.id in needed or _is_argument(each, is_entry)]
        if len(kept) != len(computation.instructions):
            copies = [type(each).FromString(each.SerializeToString()) for each in kept]
            del computation.instructions[:]
            computation.instructions.extend(copies)
        pending += [callee for each in computation.instructions for callee in each.called_computation_ids]
    for index in reversed(range(len(module.computations))):
        if module.computations[index].id not in called:
            del module.computations[index]


def _is_argument(instruction: Any, is_entry: bool) -> bool:
    """Return whether a called computation keeps a parameter: its caller passes all of them."""
    return instruction.opcode == "parameter" and not is_entry


def _find_needed(computation: Any) -> set[int]:
    by_id = {each.id: each for each in computation.instructions}
    pending, needed = [computation.root_id], set()
    while pending:
        current = pending.pop()
        if current not in needed:
            needed.add(current)
            pending += [*by_id[current].operand_ids, *by_id[current].control_predecessor_ids]
    return needed


def order_parameters(module: Any, numbers: Sequence[int], names: Sequence[str]) -> None:
    """Number the entry's parameters by their place in `numbers`, and name them.

    Args:
        numbers: the old parameter numbers in their new order; the others are gone.
    """
    by_number = {each.parameter_number: each for each in hlo.parameters(module)}
    for new, (old, name) in enumerate(zip(numbers, names, strict=True)):
        parameter = by_number[old]
        parameter.parameter_number = new
        parameter.name = name
        # What the SDK's runtimes look for; a compiled graph would else choose names of its own.
        _set_attribute(parameter, "neff_input_names", f"input{new}")


def name_outputs(module: Any, count: int) -> None:
    """Name the elements of the result tuple for the compiled graph."""
    entry = hlo.entry(module)
    root = next(each for each in entry.instructions if each.id == entry.root_id)
    _set_attribute(root, "neff_output_names", ",".join(f"output{index}" for index in range(count)))


def _set_attribute(instruction: Any, key: str, value: str) -> None:
    instruction.ClearField("frontend_attributes")
    instruction.frontend_attributes.map.add(key=key, value=value)


def alias_outputs(module: Any, aliases: Mapping[int, int]) -> None:
    """Declare that an element of the result tuple is a parameter's memory: result index to parameter number."""
    module.ClearField("input_output_alias")
    for output, parameter in aliases.items():
        module.input_output_alias.entries.add(
            output_shape_index=[output], parameter_number=parameter, kind=hlo.MUST_ALIAS
        )


def canonicalize(module: Any, name: str) -> None:
    """Give everything the names and ids that follow from the module's contents, and remove this machine's files."""
    module.name, module.id = name, 0
    module.ClearField("stack_frame_index")
    entry = hlo.entry(module)
    new_ids = _assign_ids(module)
    for computation, instruction in hlo.instructions(module):
        instruction.id = new_ids[instruction.id]
        if computation is not entry or instruction.opcode != "parameter":
            instruction.name = f"{instruction.opcode}.{instruction.id}"
        for field in (
            instruction.operand_ids,
            instruction.control_predecessor_ids,
            instruction.called_computation_ids,
        ):
            field[:] = [new_ids[old] for old in field]
        _clean_metadata(instruction)
    for computation in module.computations:
        # XLA takes names of computations apart at a dot, and stops the process where there is none.
        base = name if computation is entry else "computation"
        computation.id, computation.root_id = new_ids[computation.id], new_ids[computation.root_id]
        computation.name = f"{base}.{computation.id}"
        _write_shape(computation)
    module.entry_computation_id, module.entry_computation_name = entry.id, entry.name
    module.host_program_shape.CopyFrom(entry.program_shape)


def _assign_ids(module: Any) -> dict[int, int]:
    """Return new ids by old ones. XLA looks computations and instructions up in one table, so none may share an id."""
    old = [each.id for _, each in hlo.instructions(module)] + [each.id for each in module.computations]
    return {old_id: index for index, old_id in enumerate(old, start=1)}


def _clean_metadata(instruction: Any) -> None:
    kind, path = instruction.metadata.op_type, _SCOPE_NUMBER.sub("", instruction.metadata.op_name)
    instruction.ClearField("metadata")
    if kind:
        instruction.metadata.op_type, instruction.metadata.op_name = kind, path
    if not instruction.frontend_attributes.map:
        instruction.ClearField("frontend_attributes")


def _write_shape(computation: Any) -> None:
    by_id = {each.id: each for each in computation.instructions}
    parameters = sorted(
        (each for each in computation.instructions if each.opcode == "parameter"),
        key=lambda each: each.parameter_number,
    )
    computation.ClearField("program_shape")
    for parameter in parameters:
        computation.program_shape.parameters.add().CopyFrom(parameter.shape)
        computation.program_shape.parameter_names.append(parameter.name)
    computation.program_shape.result.CopyFrom(by_id[computation.root_id].shape)
