# SPDX-License-Identifier: Apache-2.0
"""A lowered module with float32 in place of 16-bit numbers: the same instructions, without rounding that hides mistakes.

In bfloat16 a wrong window edge may cost less than rounding does. Widened, the module has to agree with the model in float32,
where rounding is 2**16 times smaller. All but the types, and so all that can be wired wrongly, is the compiled module's.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import torch

from ...targets.neuron.graphs import hlo
from ...targets.neuron.graphs.io import GraphIO


_NARROW = {"bfloat16": "bf16s", "float16": "f16s"}
_FLOAT32 = hlo.ELEMENT_TYPES["float32"]


def widen_module(data: bytes, io: GraphIO) -> tuple[bytes, GraphIO]:
    """Return the module and its description with float32 in place of bfloat16 and float16.

    Raises:
        ValueError: an instruction reads the bits of a 16-bit number, which would be others.
    """
    module = hlo.parse(data)
    for computation in module.computations:
        _widen_program(computation.program_shape)
        shapes = {each.id: each.shape for each in computation.instructions}
        narrow = {number for number, shape in shapes.items() if hlo.dtype_name(shape) in _NARROW}
        for instruction in computation.instructions:
            if instruction.opcode == "bitcast-convert" and instruction.operand_ids[0] in narrow:
                raise ValueError(
                    f"{instruction.name} looks at the bits of a 16-bit number; convert it to float32 first"
                )
            if instruction.HasField("literal"):
                _widen_literal(instruction.literal)
            _widen_shape(instruction.shape)
    _widen_program(module.host_program_shape)
    wide = hlo.serialize(module)
    inputs = tuple(replace(each, dtype=_wide_dtype(each.dtype)) for each in io.inputs)
    outputs = tuple(replace(each, dtype=_wide_dtype(each.dtype)) for each in io.outputs)
    return wide, replace(io, inputs=inputs, outputs=outputs, hlo_sha256=hashlib.sha256(wide).hexdigest())


def _wide_dtype(dtype: str) -> str:
    return "float32" if dtype in _NARROW else dtype


def _widen_program(program: Any) -> None:
    for shape in (*program.parameters, program.result):
        _widen_shape(shape)


def _widen_shape(shape: Any) -> None:
    if hlo.dtype_name(shape) in _NARROW:
        shape.element_type = _FLOAT32
    for inner in shape.tuple_shapes:
        _widen_shape(inner)


def _widen_literal(literal: Any) -> None:
    name = hlo.dtype_name(literal.shape)
    if name in _NARROW:
        field = _NARROW[name]
        numbers = torch.frombuffer(bytearray(getattr(literal, field)), dtype=getattr(torch, name))
        literal.ClearField(field)
        literal.f32s.extend(numbers.float().tolist())
    _widen_shape(literal.shape)
