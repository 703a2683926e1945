# SPDX-License-Identifier: Apache-2.0
"""Passes over an HLO module between torch-xla and the Neuron compiler, each in place.

torch-xla numbers parameters by first use, passes scalars as parameters, computes indices in 64 bits, and takes names and ids
from counters of its process. The passes undo that, so that a module's bytes depend on its graph alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..graphs import hlo
from ..graphs.io import NARROW


_INT32 = range(-(2**31), 2**31)
_HALVES = {"bf16s": torch.bfloat16, "f16s": torch.float16}
# The field of a literal that has the values of a type; those of the last three are bytes.
_LITERAL_FIELDS = {
    "bool": "preds", "int32": "s32s", "int64": "s64s", "float32": "f32s", "float64": "f64s",
    "uint8": "u8s", "bfloat16": "bf16s", "float16": "f16s",
}  # fmt: skip
_FLOAT32_LIMIT = 3.4028234663852886e38
# A scope that torch-xla pushed ends with a number of its own.
_SCOPE_NUMBER = re.compile(r"\.\d+(?=/)")


def inline_constants(module: Any, constants: Mapping[int, Tensor]) -> None:
    """Turn parameters into the CPU tensors `constants`, by number; raise ValueError for a type without a literal."""
    for parameter in hlo.parameters(module):
        tensor = constants.get(parameter.parameter_number)
        if tensor is None:
            continue
        name = hlo.dtype_name(parameter.shape)
        if name not in _LITERAL_FIELDS:
            raise ValueError(f"a constant of type {name} cannot be part of a graph; pass it as a weight")
        parameter.opcode = "constant"
        parameter.ClearField("parameter_number")
        parameter.literal.shape.CopyFrom(parameter.shape)
        field, values = _LITERAL_FIELDS[name], tensor.flatten().contiguous()
        if field in ("u8s", *_HALVES):
            setattr(parameter.literal, field, values.view(torch.uint8).numpy().tobytes())
        else:
            getattr(parameter.literal, field).extend(values.tolist())


def narrow_types(module: Any) -> None:
    """Make types 32-bit and signed, as the Neuron compiler would; raise ValueError where a whole number does not fit."""
    for _, instruction in hlo.instructions(module):
        _narrow_shape(instruction.shape)
        if not instruction.HasField("literal"):
            continue
        literal = instruction.literal
        _narrow_shape(literal.shape)
        for value in (*literal.s64s, *literal.u32s):
            if value not in _INT32:
                where = hlo.module_path(instruction) or "the step"
                raise ValueError(f"constant {value} of {where} does not fit int32")
            literal.s32s.append(value)
        literal.f32s.extend(_clamp_values(literal.f64s))
        for field in ("s64s", "u32s", "f64s"):
            literal.ClearField(field)
    for computation in module.computations:
        for shape in (*computation.program_shape.parameters, computation.program_shape.result):
            _narrow_shape(shape)


def _narrow_shape(shape: Any) -> None:
    narrow = NARROW.get(hlo.dtype_name(shape))
    if narrow is not None:
        shape.element_type = hlo.ELEMENT_TYPES[narrow]
    for part in shape.tuple_shapes:
        _narrow_shape(part)


def _clamp_values(values: Iterable[float]) -> list[float]:
    """Clamp to the finite numbers of float32; NaN stays."""
    return [max(-_FLOAT32_LIMIT, min(value, _FLOAT32_LIMIT)) if not math.isnan(value) else value for value in values]


def make_finite(module: Any) -> None:
    """Replace infinite constants, as of masks, by the largest finite numbers: the device reports the NaN that they become.

    Initial values of reductions stay: the largest of nothing is minus infinity.
    """
    for computation in module.computations:
        initial: set[int] = set()
        for each in computation.instructions:
            if each.opcode == "reduce":
                initial.update(each.operand_ids[len(each.operand_ids) // 2 :])
        for instruction in computation.instructions:
            if instruction.id in initial or not any(map(math.isinf, hlo.literal_values(instruction))):
                continue
            literal = instruction.literal
            literal.f32s[:] = _clamp_values(literal.f32s)
            for field, dtype in _HALVES.items():
                data = getattr(literal, field)
                if data:
                    limit = torch.finfo(dtype).max
                    halves = torch.frombuffer(bytearray(data), dtype=dtype).clamp(-limit, limit)
                    setattr(literal, field, halves.view(torch.int16).numpy().tobytes())


def fold_trivial(module: Any) -> None:
    """Remove what changes nothing: converts to the same type or of scalar constants, tuples taken apart again, transposes to the
    same order, factors of 1, and tokens.

    torch-xla multiplies what is added or subtracted by torch's `alpha`. It orders collectives by a token: a zero that is added to the
    input of each, or passes through an all-reduce as a second tensor, and is multiplied by a number of the result. Infinity in one row would
    so become NaN in all rows. Collectives depend on each other only where their data does. An addition of zero goes, also where the model's
    own code shares the constant.
    """
    for computation in module.computations:
        by_id = {each.id: each for each in computation.instructions}
        stands_for: dict[int, int] = {}
        tokens = _find_first_tokens(computation, by_id)
        for each in computation.instructions:
            operands = [stands_for.get(operand, operand) for operand in each.operand_ids]
            each.operand_ids[:] = operands
            source: Any = by_id[operands[0]] if operands else None
            same: int | None = None
            if _passes_token(each) and not tokens.isdisjoint(operands):
                tokens.add(each.id)
            if each.opcode == "all-reduce" and len(operands) == 2:
                tokens.add(each.operand_ids.pop())
                each.shape.CopyFrom(source.shape)
            elif each.opcode == "add" and not tokens.isdisjoint(operands):
                same = operands[0] if operands[1] in tokens else operands[1]
            elif each.opcode == "multiply":
                ones = [_is_one(operand, by_id) for operand in operands]
                if any(ones):
                    same = operands[0] if ones[1] else operands[1]
            elif each.opcode == "get-tuple-element" and source.opcode == "tuple":
                same = source.operand_ids[each.tuple_index]
            elif each.opcode == "transpose" and list(each.dimensions) == sorted(each.dimensions):
                same = source.id
            elif each.opcode == "get-tuple-element" and source.opcode == "all-reduce" and each.tuple_index > 0:
                tokens.add(each.id)
            elif (each.opcode == "get-tuple-element" and source.opcode == "all-reduce") or (
                each.opcode == "convert" and source.shape.element_type == each.shape.element_type
            ):
                same = source.id
            elif each.opcode == "convert" and source.opcode == "constant" and not source.shape.dimensions:
                _fold_scalar(each, source)
            if same is not None:
                stands_for[each.id] = same
        computation.root_id = stands_for.get(computation.root_id, computation.root_id)


def _find_first_tokens(computation: Any, by_id: dict[int, Any]) -> set[int]:
    """Return the zeros that are added to what a collective takes."""
    taken = [
        by_id[operand]
        for each in computation.instructions
        if each.opcode in hlo.COLLECTIVES
        for operand in each.operand_ids
    ]
    added = (operand for each in taken if each.opcode == "add" for operand in each.operand_ids)
    return {
        each.id for each in (_find_scalar(operand, by_id) for operand in added) if each is not None and _holds(each, 0)
    }


def _passes_token(each: Any) -> bool:
    return each.opcode in ("broadcast", "convert", "reshape") or (
        each.opcode == "multiply" and not each.shape.dimensions
    )


def _find_scalar(number: int, by_id: dict[int, Any]) -> Any:
    """Return the constant that an instruction repeats in any shape or type; None where it is more than one number, or computed."""
    instruction = by_id[number]
    while instruction.opcode in ("broadcast", "convert", "reshape"):
        instruction = by_id[instruction.operand_ids[0]]
    return instruction if instruction.opcode == "constant" and not instruction.shape.dimensions else None


def _is_one(number: int, by_id: dict[int, Any]) -> bool:
    scalar = _find_scalar(number, by_id)
    return scalar is not None and _holds(scalar, 1)


def _holds(scalar: Any, value: int) -> bool:
    return hlo.dtype_name(scalar.shape) != "bool" and list(hlo.literal_values(scalar)) == [value]


def _fold_scalar(convert: Any, source: Any) -> None:
    casts = {"preds": bool, "s32s": int, "f32s": float}
    old, new = (_LITERAL_FIELDS.get(hlo.dtype_name(each.shape), "") for each in (source, convert))
    # Only what is exact in both types: float to int rounds, int32 to float32 may.
    if old not in casts or new not in casts or (old == "f32s" and new != "f32s"):
        return
    value = getattr(source.literal, old)[0]
    if new == "f32s" and abs(value) > 2**24:
        return
    convert.opcode = "constant"
    convert.ClearField("operand_ids")
    convert.literal.shape.CopyFrom(convert.shape)
    getattr(convert.literal, new).append(casts[new](value))


def remove_unused(module: Any) -> None:
    """Remove instructions that no result needs, parameters included, and computations that nothing calls."""
    pending, called = [module.entry_computation_id], set()
    by_id = {computation.id: computation for computation in module.computations}
    while pending:
        computation = by_id[pending.pop()]
        if computation.id in called:
            continue
        called.add(computation.id)
        instructions = {each.id: each for each in computation.instructions}
        found, needed = [computation.root_id], set[int]()
        while found:
            current = found.pop()
            if current not in needed:
                needed.add(current)
                found += [*instructions[current].operand_ids, *instructions[current].control_predecessor_ids]
        if computation.id != module.entry_computation_id:  # a caller passes all of a computation's parameters
            needed |= {each.id for each in computation.instructions if each.opcode == "parameter"}
        kept = [each for each in computation.instructions if each.id in needed]
        if len(kept) != len(computation.instructions):
            hlo.replace_items(computation.instructions, kept)
        pending += [callee for each in computation.instructions for callee in each.called_computation_ids]
    for index in reversed(range(len(module.computations))):
        if module.computations[index].id not in called:
            del module.computations[index]


def bind_names(module: Any, parameters: Sequence[tuple[int, str]], aliases: Sequence[str | None]) -> None:
    """Number and name the entry's parameters, by old numbers in their new order; `aliases` has each result's parameter, if any."""
    by_number = {each.parameter_number: each for each in hlo.parameters(module)}
    for new, (old, name) in enumerate(parameters):
        parameter = by_number[old]
        parameter.parameter_number, parameter.name = new, name
        # What the SDK's runtimes look for; a compiled graph would else choose names of its own.
        _set_attribute(parameter, "neff_input_names", f"input{new}")
    outputs = ",".join(f"output{index}" for index in range(len(aliases)))
    _set_attribute(hlo.find_root(hlo.entry(module)), "neff_output_names", outputs)
    module.ClearField("input_output_alias")
    names = [name for _, name in parameters]
    for index, alias in enumerate(aliases):
        if alias is not None:
            entry = module.input_output_alias.entries.add(output_shape_index=[index], kind=hlo.MUST_ALIAS)
            entry.parameter_number = names.index(alias)


def _set_attribute(instruction: Any, key: str, value: str) -> None:
    instruction.ClearField("frontend_attributes")
    instruction.frontend_attributes.map.add(key=key, value=value)


def canonicalize(module: Any, name: str) -> None:
    """Give everything the names and ids that follow from the module's contents, and remove this machine's files."""
    module.name, module.id = name, 0
    module.ClearField("stack_frame_index")
    entry = hlo.entry(module)
    new_ids = {old: new for new, old in enumerate(hlo.all_ids(module), start=1)}
    for computation, instruction in hlo.instructions(module):
        instruction.id = new_ids[instruction.id]
        if computation is not entry or instruction.opcode != "parameter":
            instruction.name = f"{instruction.opcode}.{instruction.id}"
        for field in (
            instruction.operand_ids, instruction.control_predecessor_ids, instruction.called_computation_ids,
        ):  # fmt: skip
            field[:] = [new_ids[old] for old in field]
        kind, path = instruction.metadata.op_type, _SCOPE_NUMBER.sub("", instruction.metadata.op_name)
        instruction.ClearField("metadata")
        if kind:
            instruction.metadata.op_type, instruction.metadata.op_name = kind, path
        if not instruction.frontend_attributes.map:
            instruction.ClearField("frontend_attributes")
    for computation in module.computations:
        # XLA takes names of computations apart at a dot, and stops the process where there is none.
        base = name if computation is entry else "computation"
        computation.id, computation.root_id = new_ids[computation.id], new_ids[computation.root_id]
        computation.name = f"{base}.{computation.id}"
        computation.ClearField("program_shape")
        parameters = [each for each in computation.instructions if each.opcode == "parameter"]
        for parameter in sorted(parameters, key=lambda each: each.parameter_number):
            computation.program_shape.parameters.add().CopyFrom(parameter.shape)
            computation.program_shape.parameter_names.append(parameter.name)
        computation.program_shape.result.CopyFrom(hlo.find_root(computation).shape)
    module.entry_computation_id, module.entry_computation_name = entry.id, entry.name
    module.host_program_shape.CopyFrom(entry.program_shape)
