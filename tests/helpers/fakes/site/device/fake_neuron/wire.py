# SPDX-License-Identifier: Apache-2.0
"""Reads an HloModuleProto without protobuf, as far as the fake compiler and device need it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass


ELEMENT_TYPES = {2: "int8", 4: "int32", 5: "int64", 6: "uint8", 10: "float16", 11: "float32", 16: "bfloat16"}


@dataclass(frozen=True)
class Tensor:
    name: str  # of the instruction, or of the result
    neff_name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Instruction:
    opcode: str
    shape: tuple[int, ...]
    dtype: str | None  # None for a tuple
    operands: tuple[int, ...]
    parameter: int


@dataclass(frozen=True)
class Module:
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    aliases: dict[int, int]  # result to parameter
    instructions: dict[int, Instruction]  # of the entry computation, operands first


def read_module(data: bytes) -> Module:
    """The interface of a module; ValueError where the bytes are none."""
    module = fields(data)
    entry_id = module[6][0] if module[6] else 0
    computations = [fields(each) for each in module[3]]
    entry = next((each for each in computations if (each[5] or [0])[0] == entry_id), None)
    if entry is None:
        raise ValueError("no entry computation")
    instructions = [fields(each) for each in entry[2]]
    parameters = [each for each in instructions if each[2] == [b"parameter"]]
    parameters.sort(key=lambda each: (each[9] or [0])[0])
    root = next(each for each in instructions if (each[35] or [0])[0] == (entry[6] or [0])[0])
    inputs = [
        _tensor(each[1][0].decode(), each[3][0], _attributes(each).get("neff_input_names", f"input{index}"))
        for index, each in enumerate(parameters)
    ]
    shapes = fields(root[3][0])[4]
    names = _attributes(root).get("neff_output_names", "").split(",")
    outputs = [
        _tensor(f"result {index}", shape, names[index] if names != [""] else f"output{index}")
        for index, shape in enumerate(shapes)
    ]
    return Module(tuple(inputs), tuple(outputs), _aliases(module[8]), dict(map(_instruction, instructions)))


def _instruction(found: dict) -> tuple[int, Instruction]:
    shape = fields(found[3][0])
    return found[35][0], Instruction(
        opcode=found[2][0].decode(),
        shape=tuple(numbers(shape[3])),
        dtype=ELEMENT_TYPES.get((shape[2] or [0])[0]),
        operands=tuple(numbers(found[36])),
        parameter=(found[9] or [0])[0],
    )


def _tensor(name: str, shape: bytes, neff_name: str) -> Tensor:
    described = fields(shape)
    number = described[2][0]
    if number not in ELEMENT_TYPES:
        raise ValueError(f"{name} has element type {number}")
    return Tensor(name, neff_name, tuple(numbers(described[3])), ELEMENT_TYPES[number])


def _attributes(instruction: dict) -> dict[str, str]:
    entries = [fields(entry) for each in instruction[68] for entry in fields(each)[1]]
    return {entry[1][0].decode(): entry[2][0].decode() for entry in entries}


def _aliases(configs: list) -> dict[int, int]:
    aliases = {}
    for config in configs:
        for entry in map(fields, fields(config)[1]):
            if entry[4] != [2]:
                raise ValueError("an alias is not MUST_ALIAS")
            aliases[numbers(entry[1])[0]] = (entry[2] or [0])[0]
    return aliases


def numbers(values: list) -> list[int]:
    """A repeated integer field, packed or not."""
    numbers = []
    for value in values:
        if isinstance(value, int):
            numbers.append(value)
        else:
            position = 0
            while position < len(value):
                number, position = _varint(value, position)
                numbers.append(number)
    return numbers


def fields(data: bytes) -> dict:
    """Field numbers to values: integers and bytes."""
    found: dict = defaultdict(list)
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            value, position = _varint(data, position)
        elif kind in (1, 2, 5):
            length, position = _varint(data, position) if kind == 2 else ({1: 8, 5: 4}[kind], position)
            value, position = data[position : position + length], position + length
            if len(value) != length:
                raise ValueError("truncated")
        else:
            raise ValueError(f"wire type {kind}")
        found[number].append(value)
    return found


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if position >= len(data):
            raise ValueError("truncated")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, position
