# SPDX-License-Identifier: Apache-2.0
"""What happens to an HLO module between torch-xla and the Neuron compiler, each pass in place.

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

from ..graph_io import NARROW
from . import hlo


_INT32 = range(-(2**31), 2**31)
# Where a literal of a type keeps its values, for the types that appear once modules are narrow.
_LITERAL_FIELDS = {"bool": "preds", "int32": "s32s", "int64": "s64s", "float32": "f32s", "float64": "f64s"}
_HALVES = {"bf16s": torch.bfloat16, "f16s": torch.float16}
_FLOAT32_LIMIT = 3.4028234663852886e38
# A scope that torch-xla pushed ends with a number of its own.
_SCOPE_NUMBER = re.compile(r"\.\d+(?=/)")


def inline_constants(module: Any, constants: Mapping[int, Tensor]) -> None:
    """Turns parameters into constants.

    Args:
        constants: CPU tensors by parameter number.

    Raises:
        ValueError: a constant has a type without a literal.
    """
    for parameter in hlo.parameters(module):
        tensor = constants.get(parameter.parameter_number)
        if tensor is None:
            continue
        name = hlo.dtype_name(parameter.shape)
        parameter.opcode = "constant"
        parameter.ClearField("parameter_number")
        parameter.literal.shape.CopyFrom(parameter.shape)
        field = _LITERAL_FIELDS.get(name)
        if field is not None:
            getattr(parameter.literal, field).extend(tensor.flatten().tolist())
        elif name == "uint8":
            parameter.literal.u8s = tensor.flatten().contiguous().numpy().tobytes()
        elif name in ("bfloat16", "float16"):
            packed = tensor.flatten().contiguous().view(torch.int16).numpy().tobytes()
            setattr(parameter.literal, "bf16s" if name == "bfloat16" else "f16s", packed)
        else:
            raise ValueError(f"a constant of type {name} cannot be part of a graph; pass it as a weight")


def narrow_types(module: Any) -> None:
    """Makes 64-bit types 32-bit ones, as the Neuron compiler would, and unsigned numbers signed ones.

    Values are token ids, positions and indices, all of which begin as int32 inputs.

    Raises:
        ValueError: an integer constant does not fit.
    """
    for _, instruction in hlo.instructions(module):
        for shape in _shapes(instruction.shape):
            _narrow_shape(shape)
        if instruction.HasField("literal"):
            _narrow_literal(instruction)
    for computation in module.computations:
        for shape in (*computation.program_shape.parameters, computation.program_shape.result):
            for part in _shapes(shape):
                _narrow_shape(part)


def _narrow_shape(shape: Any) -> None:
    narrow = NARROW.get(hlo.dtype_name(shape))
    if narrow is not None:
        shape.element_type = hlo.ELEMENT_TYPES[narrow]


def _narrow_literal(instruction: Any) -> None:
    literal = instruction.literal
    for shape in _shapes(literal.shape):
        _narrow_shape(shape)
    for value in (*literal.s64s, *literal.u32s):
        if value not in _INT32:
            raise ValueError(f"constant {value} of {hlo.module_path(instruction) or 'the step'} does not fit int32")
        literal.s32s.append(value)
    literal.f32s.extend(_clamped(literal.f64s))
    for field in ("s64s", "u32s", "f64s"):
        literal.ClearField(field)


def _clamped(values: Iterable[float]) -> list[float]:
    """To the finite numbers of float32; NaN stays."""
    return [max(-_FLOAT32_LIMIT, min(value, _FLOAT32_LIMIT)) if not math.isnan(value) else value for value in values]


def _shapes(shape: Any) -> list[Any]:
    return [shape, *(part for each in shape.tuple_shapes for part in _shapes(each))]


def make_finite(module: Any) -> None:
    """Replaces infinite constants by the largest finite numbers, as masks are: the device reports what becomes NaN of them.

    Where a reduction starts they stay: the largest of nothing is minus infinity.
    """
    for computation in module.computations:
        initial = {
            operand
            for each in computation.instructions
            if each.opcode == "reduce"
            for operand in each.operand_ids[len(each.operand_ids) // 2 :]
        }
        for instruction in computation.instructions:
            if instruction.id not in initial and any(map(math.isinf, hlo.literal_values(instruction))):
                _make_literal_finite(instruction.literal)


def _make_literal_finite(literal: Any) -> None:
    literal.f32s[:] = _clamped(literal.f32s)
    for field, dtype in _HALVES.items():
        data = getattr(literal, field)
        if data:
            limit = torch.finfo(dtype).max
            halves = torch.frombuffer(bytearray(data), dtype=dtype).clamp(-limit, limit)
            setattr(literal, field, halves.view(torch.int16).numpy().tobytes())


def fold_trivial(module: Any) -> None:
    """Removes what changes nothing: converts to the same type or of scalar constants, tuples taken apart again, factors of 1.

    torch-xla multiplies what is added or subtracted by torch's `alpha`.
    """
    for computation in module.computations:
        by_id = {each.id: each for each in computation.instructions}
        stands_for: dict[int, int] = {}
        for instruction in computation.instructions:
            for index, operand in enumerate(instruction.operand_ids):
                instruction.operand_ids[index] = stands_for.get(operand, operand)
            if instruction.opcode == "multiply":
                left, right = instruction.operand_ids
                if _is_one(right, by_id) or _is_one(left, by_id):
                    stands_for[instruction.id] = left if _is_one(right, by_id) else right
            if instruction.opcode not in ("convert", "get-tuple-element"):
                continue
            source = by_id[instruction.operand_ids[0]]
            if instruction.opcode == "get-tuple-element":
                if source.opcode == "tuple":
                    stands_for[instruction.id] = source.operand_ids[instruction.tuple_index]
            elif source.shape.element_type == instruction.shape.element_type:
                stands_for[instruction.id] = source.id
            elif source.opcode == "constant" and not source.shape.dimensions:
                _fold_scalar(instruction, source)
        computation.root_id = stands_for.get(computation.root_id, computation.root_id)


def _is_one(number: int, by_id: dict[int, Any]) -> bool:
    """Whether an instruction is a constant whose every value is 1, of any type."""
    instruction = by_id[number]
    while instruction.opcode in ("broadcast", "convert", "reshape"):
        instruction = by_id[instruction.operand_ids[0]]
    if instruction.opcode != "constant" or instruction.shape.dimensions:
        return False
    return hlo.dtype_name(instruction.shape) != "bool" and list(hlo.literal_values(instruction)) == [1]


def _fold_scalar(convert: Any, source: Any) -> None:
    sources = {name: _LITERAL_FIELDS[name] for name in ("bool", "int32", "float32")}
    old, new = sources.get(hlo.dtype_name(source.shape)), sources.get(hlo.dtype_name(convert.shape))
    # Only what is exact in both types: float to int rounds, int32 to float32 may.
    if old is None or new is None or (old == "f32s" and new != "f32s"):
        return
    value = getattr(source.literal, old)[0]
    if new == "f32s" and abs(value) > 2**24:
        return
    convert.opcode = "constant"
    convert.ClearField("operand_ids")
    convert.literal.shape.CopyFrom(convert.shape)
    getattr(convert.literal, new).append({"preds": bool, "s32s": int, "f32s": float}[new](value))


def drop_tokens(module: Any) -> None:
    """Takes torch-xla's order out of the collectives: they depend on each other only where their data does.

    It passes a zero through every all-reduce, as a second tensor, and adds that to the input of the next collective. What is
    taken out is an addition of zero, also where the model's own code shares the constant.
    """
    for computation in module.computations:
        by_id = {each.id: each for each in computation.instructions}
        zeros: set[int] = set()
        stands_for: dict[int, int] = {}
        for instruction in computation.instructions:
            operands = [stands_for.get(operand, operand) for operand in instruction.operand_ids]
            instruction.operand_ids[:] = operands
            if instruction.opcode == "all-reduce" and len(operands) == 2:
                zeros.add(operands[1])
                del instruction.operand_ids[1]
                instruction.shape.CopyFrom(by_id[operands[0]].shape)
            elif instruction.opcode == "get-tuple-element" and by_id[operands[0]].opcode == "all-reduce":
                if instruction.tuple_index == 0:
                    stands_for[instruction.id] = operands[0]
                else:
                    zeros.add(instruction.id)
            elif not zeros.isdisjoint(operands):
                if instruction.opcode == "add":
                    stands_for[instruction.id] = operands[0] if operands[1] in zeros else operands[1]
                elif instruction.opcode in ("broadcast", "convert", "multiply", "reshape"):
                    zeros.add(instruction.id)


def remove_unused(module: Any) -> None:
    """Removes instructions that no result needs, parameters included, and computations that nothing calls."""
    pending, called = [module.entry_computation_id], set()
    by_id = {computation.id: computation for computation in module.computations}
    while pending:
        computation = by_id[pending.pop()]
        if computation.id in called:
            continue
        called.add(computation.id)
        is_entry = computation.id == module.entry_computation_id
        needed = _needed(computation)
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
    """A called computation keeps all of its parameters: its caller passes them."""
    return instruction.opcode == "parameter" and not is_entry


def _needed(computation: Any) -> set[int]:
    by_id = {each.id: each for each in computation.instructions}
    pending, needed = [computation.root_id], set()
    while pending:
        current = pending.pop()
        if current not in needed:
            needed.add(current)
            pending += [*by_id[current].operand_ids, *by_id[current].control_predecessor_ids]
    return needed


def order_parameters(module: Any, numbers: Sequence[int], names: Sequence[str]) -> None:
    """Numbers the entry's parameters anew, and names them.

    Args:
        numbers: the old parameter numbers in their new order; the others are gone.
        names: their new names.
    """
    by_number = {each.parameter_number: each for each in hlo.parameters(module)}
    for new, (old, name) in enumerate(zip(numbers, names, strict=True)):
        parameter = by_number[old]
        parameter.parameter_number = new
        parameter.name = name
        # What the SDK's runtimes look for; a compiled graph would else choose names of its own.
        _set_attribute(parameter, "neff_input_names", f"input{new}")


def name_outputs(module: Any, count: int) -> None:
    """Names the elements of the result tuple for the compiled graph."""
    entry = hlo.entry(module)
    root = next(each for each in entry.instructions if each.id == entry.root_id)
    _set_attribute(root, "neff_output_names", ",".join(f"output{index}" for index in range(count)))


def _set_attribute(instruction: Any, key: str, value: str) -> None:
    instruction.ClearField("frontend_attributes")
    instruction.frontend_attributes.map.add(key=key, value=value)


def alias_outputs(module: Any, aliases: Mapping[int, int]) -> None:
    """Declares that an element of the result tuple is a parameter's memory: result index to parameter number."""
    module.ClearField("input_output_alias")
    for output, parameter in aliases.items():
        module.input_output_alias.entries.add(
            output_shape_index=[output], parameter_number=parameter, kind=hlo.MUST_ALIAS
        )


def canonicalize(module: Any, name: str) -> None:
    """Gives everything the names and ids that follow from the module's contents, and forgets this machine's files."""
    module.name, module.id = name, 0
    module.ClearField("stack_frame_index")
    entry = hlo.entry(module)
    new_ids = _number(module)
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
        _describe(computation)
    module.entry_computation_id, module.entry_computation_name = entry.id, entry.name
    module.host_program_shape.CopyFrom(entry.program_shape)


def _number(module: Any) -> dict[int, int]:
    """New ids by old ones. XLA looks computations and instructions up in one table, so none may share an id."""
    old = [each.id for _, each in hlo.instructions(module)] + [each.id for each in module.computations]
    return {old_id: index for index, old_id in enumerate(old, start=1)}


def _clean_metadata(instruction: Any) -> None:
    kind, path = instruction.metadata.op_type, _SCOPE_NUMBER.sub("", instruction.metadata.op_name)
    instruction.ClearField("metadata")
    if kind:
        instruction.metadata.op_type, instruction.metadata.op_name = kind, path
    if not instruction.frontend_attributes.map:
        instruction.ClearField("frontend_attributes")


def _describe(computation: Any) -> None:
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
