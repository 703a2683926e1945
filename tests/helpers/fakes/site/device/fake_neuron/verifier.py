# SPDX-License-Identifier: Apache-2.0
"""What the fake compiler refuses, by the real one's codes, from the bytes alone: it knows nothing of the lint."""

from __future__ import annotations

import base64
import json
import math
import os
from collections import Counter
from collections.abc import Iterator

from .wire import fields, numbers


# xla_data.proto, PrimitiveType
PRED, S8, S16, S32, S64, U8, U16, U32, U64, F64, C64, C128, TUPLE = 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 18, 13
INTEGERS = {PRED, S8, S16, S32, S64, U8, U16, U32, U64}
TYPE_CODES = {
    F64: "ESPP004", S64: "ESPP004", U64: "ESPP004", C64: "EVRF004", C128: "EVRF004", 23: "EVRF005", 24: "EVRF005",
    25: "EVRF005",
}  # fmt: skip
F8E4M3FN, F8E4M3 = 20, 28
OPCODES = (
    dict.fromkeys(("while", "conditional", "call", "infeed", "outfeed", "send", "recv"), "EVRF001")
    | dict.fromkeys(("rng", "rng-bit-generator", "rng-get-and-update-state"), "EVRF006")
    | dict.fromkeys(("sort", "topk"), "EVRF029")
    | {"reduce-window": "EVRF017"}
)
WIDTHS = {PRED: 1, S8: 1, U8: 1, S16: 2, U16: 2, 10: 2, 16: 2, S64: 8, U64: 8, F64: 8, C64: 8, C128: 16}
CORE_GIB = {"inf2": 16, "trn1": 16, "trn1n": 16, "trn2": 24, "trn3": 36}
MOVES = {"reshape", "broadcast", "convert", "copy", "transpose", "bitcast"}


class Instruction:
    """One instruction, as far as it is verified."""

    def __init__(self, data: bytes) -> None:
        self.fields = fields(data)
        self.opcode = self.fields[2][0].decode()
        self.operands = numbers(self.fields[36])
        self.shape = Shape(self.fields[3][0])

    def number(self, field: int) -> int:
        return int((self.fields[field] or [0])[0])

    def text(self, field: int) -> str:
        return (self.fields[field] or [b""])[0].decode()


class Shape:
    def __init__(self, data: bytes) -> None:
        found = fields(data)
        self.type = (found[2] or [0])[0]
        self.sizes = numbers(found[3])
        self.parts = [Shape(each) for each in found[4]]
        self.dynamic = any(numbers(found[6]))

    def bytes(self) -> int:
        return math.prod(self.sizes) * WIDTHS.get(self.type, 4) if not self.parts else 0


class Verifier:
    """A module's computations, and what of them is refused."""

    def __init__(self, data: bytes, target: str) -> None:
        self.module, self.target = fields(data), target
        computations = [fields(each) for each in self.module[3]]
        entry_id = (self.module[6] or [0])[0]
        self.roots = {(each[5] or [0])[0]: (each[6] or [0])[0] for each in computations}
        self.all: dict[int, Instruction] = {}
        self.entry: list[Instruction] = []
        for computation in computations:
            for instruction in map(Instruction, computation[2]):
                self.all[instruction.number(35)] = instruction
                if (computation[5] or [0])[0] == entry_id:
                    self.entry.append(instruction)
        self.root = self.all[self.roots[entry_id]]

    def refusals(self) -> Iterator[tuple[str, str]]:
        """Codes without their prefix, and what is wrong."""
        for each in self.all.values():
            for code in self._codes(each):
                yield code, f"{each.opcode} of type {each.shape.type}{each.shape.sizes} is not supported"
        yield from self._interface()

    def operand(self, instruction: Instruction, index: int) -> Instruction:
        return self.all[instruction.operands[index]]

    def origin(self, instruction: Instruction) -> Instruction:
        while instruction.opcode in MOVES:
            instruction = self.operand(instruction, 0)
        return instruction

    def _codes(self, each: Instruction) -> Iterator[str]:
        if each.opcode in OPCODES:
            yield OPCODES[each.opcode]
        if each.shape.type in TYPE_CODES:
            yield TYPE_CODES[each.shape.type]
        if each.shape.type == F8E4M3FN and self.target != "trn3":
            yield "EVRF051"
        if each.shape.type == F8E4M3 and self.target == "trn3":
            yield "EVRF052"
        if each.shape.dynamic:
            yield "EMOD025"
        check = getattr(self, "_" + each.opcode.replace("-", "_"), None)
        if check is not None:
            yield from check(each)

    def _custom_call(self, each: Instruction) -> Iterator[str]:
        target = each.text(28)
        if not target.startswith(("AwsNeuron", "NeuronBoundaryMarker-", "Resize")):
            yield "EVRF015"
        if target == "AwsNeuronCustomNativeKernel":
            kernel = json.loads(base64.b64decode(each.fields[43][0]))["klir_binary"]
            if not os.path.isfile(kernel["binary"]) or each.fields[38]:
                yield "EVRF059"
        if target == "AwsNeuronTopK":
            if self.operand(each, 0).shape.type in INTEGERS:
                yield "EVRF013"
            if each.shape.parts[0].sizes[-1] > (8 if self.operand(each, 0).shape.sizes[-1] >= 32768 else 16384):
                yield "EVRF014"
            if each.shape.parts[1].type != U32:
                yield "EVRF014"

    def _dynamic_slice(self, each: Instruction) -> Iterator[str]:
        start = 1 if each.opcode == "dynamic-slice" else 2
        if any(self.all[operand].opcode != "constant" for operand in each.operands[start:]):
            yield "EVRF001"

    _dynamic_update_slice = _dynamic_slice

    def _convolution(self, each: Instruction) -> Iterator[str]:
        dimensions = [fields(each) for window in each.fields[15] for each in fields(window)[1]]
        stride, kernel, base = ([(each[field] or [1])[0] for each in dimensions] for field in (2, 5, 6))
        if max(base, default=1) > 1 and max(kernel) > 1:
            yield "EVRF010"
        if max(base, default=1) > 1 and max(stride) > 1:
            yield "EVRF011"

    def _reduce(self, each: Instruction) -> Iterator[str]:
        starts = each.operands[len(each.operands) // 2 :]
        if any(self.origin(self.all[operand]).opcode != "constant" for operand in starts):
            yield "EVRF001"

    def _dot(self, each: Instruction) -> Iterator[str]:
        if self.operand(each, 0).shape.type in INTEGERS:
            yield "EVRF035"

    def _power(self, each: Instruction) -> Iterator[str]:
        if each.shape.type in INTEGERS:
            yield "EVRF062"

    def _shift_right_arithmetic(self, each: Instruction) -> Iterator[str]:
        if each.shape.type not in (S32, U32):
            yield "EVRF022"

    def _scatter(self, each: Instruction) -> Iterator[str]:
        if self._computes_with_integers(each):
            yield "EVRF060"
        if self._goes_beyond(each, fields(each.fields[48][0])[3]):
            yield "EVRF031"

    def _gather(self, each: Instruction) -> Iterator[str]:
        if self._goes_beyond(each, fields(each.fields[33][0])[3]):
            yield "EVRF056"

    def _all_reduce(self, each: Instruction) -> Iterator[str]:
        if self._computes_with_integers(each):
            yield "EVRF061"

    def _reduce_scatter(self, each: Instruction) -> Iterator[str]:
        if self._computes_with_integers(each):
            yield "EVRF063"

    def _computes_with_integers(self, each: Instruction) -> bool:
        called = numbers(each.fields[38])[0]
        return each.shape.type in INTEGERS and self.all[self.roots[called]].opcode != "parameter"

    def _goes_beyond(self, each: Instruction, mapped: list) -> bool:
        source, dims = self.origin(self.operand(each, 1)), numbers(mapped)
        if source.opcode == "iota":
            largest = source.shape.sizes[(numbers(source.fields[14]) or [0])[0]] - 1
        elif source.opcode == "constant" and source.shape.type == S32:
            largest = max(numbers(fields(source.fields[8][0])[4]))
        else:
            return False
        return len(dims) == 1 and largest >= self.operand(each, 0).shape.sizes[dims[0]]

    def _interface(self) -> Iterator[tuple[str, str]]:
        parameters = {each.number(9): each for each in self.entry if each.opcode == "parameter"}
        entries = [fields(entry) for config in self.module[8] for entry in fields(config)[1]]
        aliases = [(numbers(entry[1])[0], (entry[2] or [0])[0]) for entry in entries]
        if any(count > 1 for count in Counter(number for _, number in aliases).values()):
            yield "EVRF064", "an input is aliased twice"
        for result, number in aliases:
            left, right = self.root.shape.parts[result], parameters[number].shape
            if (left.type, left.sizes) != (right.type, right.sizes):
                yield "EVRF064", f"result {result} does not have the shape of input {number}"
        if any(self.all[operand].opcode == "parameter" for operand in self.root.operands):
            yield "EVRF064", "an output is an input"
        shared = {result for result, _ in aliases}
        results = [part for index, part in enumerate(self.root.shape.parts) if index not in shared]
        needed = sum(shape.bytes() for shape in [*(each.shape for each in parameters.values()), *results])
        if needed > CORE_GIB[self.target] << 30:
            yield "EVRF009", f"{needed} bytes of inputs and outputs"


def verify(data: bytes, target: str) -> list[tuple[str, str]]:
    """All refusals of a module; none where it is taken."""
    return list(Verifier(data, target).refusals())
