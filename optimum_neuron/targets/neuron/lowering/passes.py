# SPDX-License-Identifier: Apache-2.0
"""Passes over an HLO module between torch-xla and the Neuron compiler, each in place.

torch-xla numbers parameters by first use, passes scalars as parameters, computes indices in 64 bits, and takes names and ids
from counters of its process. The passes undo that, so that a module's bytes depend on its graph alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..graphs import hlo
from ..graphs.io import NARROW


_INT32 = range(-(2**31), 2**31)
# Where a literal of a type keeps its values, for the types that appear once modules are narrow.
_LITERAL_FIELDS = {"bool": "preds", "int32": "s32s", "int64": "s64s", "float32": "f32s", "float64": "f64s"}
_HALVES = {"bf16s": torch.bfloat16, "f16s": torch.float16}
_FLOAT32_LIMIT = 3.4028234663852886e38


def inline_constants(module: Any, constants: Mapping[int, Tensor]) -> None:
    """Turn parameters into the CPU tensors `constants`, by number; raise ValueError for a type without a literal."""
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
    """Make 64-bit types 32-bit ones, as the Neuron compiler would, and unsigned numbers signed ones.

    Values are token ids, positions and indices, which begin as int32 inputs. Raises ValueError where an integer constant does not fit.
    """
    for _, instruction in hlo.instructions(module):
        for shape in _list_shapes(instruction.shape):
            _narrow_shape(shape)
        if instruction.HasField("literal"):
            _narrow_literal(instruction)
    for computation in module.computations:
        for shape in (*computation.program_shape.parameters, computation.program_shape.result):
            for part in _list_shapes(shape):
                _narrow_shape(part)


def _narrow_shape(shape: Any) -> None:
    narrow = NARROW.get(hlo.dtype_name(shape))
    if narrow is not None:
        shape.element_type = hlo.ELEMENT_TYPES[narrow]


def _narrow_literal(instruction: Any) -> None:
    literal = instruction.literal
    for shape in _list_shapes(literal.shape):
        _narrow_shape(shape)
    for value in (*literal.s64s, *literal.u32s):
        if value not in _INT32:
            raise ValueError(f"constant {value} of {hlo.module_path(instruction) or 'the step'} does not fit int32")
        literal.s32s.append(value)
    literal.f32s.extend(_clamp_values(literal.f64s))
    for field in ("s64s", "u32s", "f64s"):
        literal.ClearField(field)


def _clamp_values(values: Iterable[float]) -> list[float]:
    """Clamp to the finite numbers of float32; NaN stays."""
    return [max(-_FLOAT32_LIMIT, min(value, _FLOAT32_LIMIT)) if not math.isnan(value) else value for value in values]


def _list_shapes(shape: Any) -> list[Any]:
    return [shape, *(part for each in shape.tuple_shapes for part in _list_shapes(each))]


def make_finite(module: Any) -> None:
    """Replace infinite constants, as of masks, by the largest finite numbers: the device reports the NaN that they become.

    Initial values of reductions stay: the largest of nothing is minus infinity.
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
    literal.f32s[:] = _clamp_values(literal.f32s)
    for field, dtype in _HALVES.items():
        data = getattr(literal, field)
        if data:
            limit = torch.finfo(dtype).max
            halves = torch.frombuffer(bytearray(data), dtype=dtype).clamp(-limit, limit)
            setattr(literal, field, halves.view(torch.int16).numpy().tobytes())


def fold_trivial(module: Any) -> None:
    """Remove what changes nothing: converts to the same type or of scalar constants, tuples taken apart again, factors of 1.

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
    """Return whether an instruction is a constant of ones, of any type."""
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
    """Take torch-xla's order out of the collectives: they depend on each other only where their data does.

    It passes a zero through every all-reduce, as a second tensor, and adds that to the input of the next collective. The pass removes an
    addition of zero, also where the model's own code shares the constant.
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
