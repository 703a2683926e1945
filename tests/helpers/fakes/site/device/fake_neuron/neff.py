# SPDX-License-Identifier: Apache-2.0
"""The fake NEFF: a header of 1024 bytes, as real ones have, and instead of instructions a line of JSON that describes the HLO, and the HLO."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


HEADER = 1024
MAGIC = "fake NEFF"


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
    dtype: str
    operands: tuple[int, ...]
    parameter: int


@dataclass(frozen=True)
class Module:
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    aliases: dict[int, int]  # result to parameter
    instructions: dict[int, Instruction]  # of the entry computation, operands first


def pack(hlo: bytes, described: dict[str, Any], target: str, lnc: int) -> bytes:
    header = json.dumps({"format": MAGIC, "target": target, "lnc": lnc}).encode()
    return header.ljust(HEADER) + json.dumps(described).encode() + b"\n" + hlo


def unpack(data: bytes) -> tuple[dict[str, Any], Module, bytes]:
    """Header, module and HLO; RuntimeError as the runtime raises it where the bytes are no NEFF."""
    try:
        header = json.loads(data[:HEADER])
    except ValueError:
        header = {}
    if header.get("format") != MAGIC or len(data) <= HEADER:
        raise RuntimeError("NRT Error NRT_INVALID(2): Failed to load model")
    line, _, hlo = data[HEADER:].partition(b"\n")
    found = json.loads(line)
    inputs, outputs = (
        tuple(Tensor(name, neff_name, tuple(shape), dtype) for name, neff_name, shape, dtype in found[kind])
        for kind in ("inputs", "outputs")
    )
    instructions = {
        number: Instruction(opcode, tuple(shape), dtype, tuple(operands), parameter)
        for number, opcode, shape, dtype, operands, parameter in found["instructions"]
    }
    return header, Module(inputs, outputs, dict(found["aliases"]), instructions), hlo
