# SPDX-License-Identifier: Apache-2.0
"""Writes small HLO modules, without protobuf or torch-xla: graphs for tests of what comes after lowering."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from optimum_neuron.targets.neuron.graphs.io import GraphIO, InputBinding, OutputBinding


ELEMENT_TYPES = {"int32": 4, "float32": 11, "bfloat16": 16}
TUPLE = 13


@dataclass(frozen=True)
class SmallGraph:
    """A lowered graph, as compile_graphs takes it."""

    name: str
    kind: str
    hlo: bytes
    io: GraphIO


class HloWriter:
    """Builds one entry computation of elementwise instructions on tensors of one shape."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._instructions: list[bytes] = []
        self._shapes: list[bytes] = []
        self._parameters: list[tuple[bytes, str]] = []

    def parameter(self, name: str, shape: Sequence[int], dtype: str) -> int:
        number = len(self._parameters)
        described = _shape(shape, dtype)
        self._parameters.append((described, name))
        fields = _varint_field(9, number) + _attribute("neff_input_names", f"input{number}")
        return self._add(name, "parameter", described, (), fields)

    def convert(self, operand: int, shape: Sequence[int], dtype: str) -> int:
        return self._add(f"convert.{self._next}", "convert", _shape(shape, dtype), (operand,))

    def reshape(self, operand: int, shape: Sequence[int], dtype: str) -> int:
        return self._add(f"reshape.{self._next}", "reshape", _shape(shape, dtype), (operand,))

    def binary(self, opcode: str, left: int, right: int) -> int:
        return self._add(f"{opcode}.{self._next}", opcode, self._shapes[left - 1], (left, right))

    def module(self, results: Sequence[int], aliases: dict[int, int]) -> bytes:
        """The serialized module; `aliases` is result index to parameter number."""
        shape = _varint_field(2, TUPLE) + b"".join(_bytes_field(4, self._shapes[each - 1]) for each in results)
        names = ",".join(f"output{index}" for index in range(len(results)))
        root = self._add(f"tuple.{self._next}", "tuple", shape, results, _attribute("neff_output_names", names))
        program = b"".join(_bytes_field(1, each) for each, _ in self._parameters) + _bytes_field(2, shape)
        program += b"".join(_bytes_field(3, name.encode()) for _, name in self._parameters)
        number = self._next  # instructions and computations share one row of numbers
        entry = _bytes_field(1, f"{self.name}.{number}".encode())
        entry += b"".join(_bytes_field(2, each) for each in self._instructions)
        entry += _bytes_field(4, program) + _varint_field(5, number) + _varint_field(6, root)
        alias = b"".join(
            _bytes_field(1, _bytes_field(1, _varint(result)) + _varint_field(2, number) + _varint_field(4, 2))
            for result, number in aliases.items()
        )
        return (
            _bytes_field(1, self.name.encode())
            + _bytes_field(2, f"{self.name}.{number}".encode())
            + _bytes_field(3, entry)
            + _bytes_field(4, program)
            + _varint_field(6, number)
            + _bytes_field(8, alias)
        )

    @property
    def _next(self) -> int:
        return len(self._instructions) + 1

    def _add(self, name: str, opcode: str, shape: bytes, operands: Sequence[int], fields: bytes = b"") -> int:
        number = self._next
        data = _bytes_field(1, name.encode()) + _bytes_field(2, opcode.encode()) + _bytes_field(3, shape) + fields
        data += _varint_field(35, number)
        if operands:
            data += _bytes_field(36, b"".join(map(_varint, operands)))
        self._instructions.append(data)
        self._shapes.append(shape)
        return number


def step_graph(name: str = "token_generation", *, size: int = 2, dtype: str = "float32", ranks: int = 1) -> SmallGraph:
    """A step of a model with one weight and one state, per element: `state += x * weight + rank`; returns it, doubled.

    Shapes are those of a KV cache: `[1, 1, 1, size]`. The rank is a weight, as in real graphs.
    """
    shape = (1, 1, 1, size)
    writer = HloWriter(name)
    x = writer.parameter("decode.x", shape, dtype)
    state = writer.parameter("kv_cache.key_0", shape, dtype)
    weight = writer.parameter("model.weight", shape, dtype)
    inputs = [
        InputBinding("decode.x", "input", shape, dtype),
        InputBinding("kv_cache.key_0", "state", shape, dtype),
        InputBinding("model.weight", "weight", shape, dtype),
    ]
    update = writer.binary("add", state, writer.binary("multiply", x, weight))
    if ranks > 1:
        rank = writer.parameter("tensor_parallel.rank", shape, "int32")
        inputs.append(InputBinding("tensor_parallel.rank", "weight", shape, "int32"))
        update = writer.binary("add", update, writer.convert(rank, shape, dtype))
    doubled = writer.binary("add", update, update)
    hlo = writer.module([doubled, update], {1: 1})
    outputs = (
        OutputBinding("decode.y", shape, dtype, None),
        OutputBinding("kv_cache.key_0", shape, dtype, "kv_cache.key_0"),
    )
    return _graph(name, "token_generation", hlo, inputs, outputs, ranks)


def copy_graph(*, dtype: str = "float32", ranks: int = 1) -> SmallGraph:
    """In place of a copy of slots: the state, of one element, becomes `source * source * destination + length`."""
    shape = (1, 1, 1, 1)
    writer = HloWriter("copy_slot")
    names = ("copy.source", "copy.destination", "copy.length")
    numbers = [writer.parameter(each, (1,), "int32") for each in names]
    state = writer.parameter("kv_cache.key_0", shape, dtype)
    source, destination, length = (writer.reshape(writer.convert(each, (1,), dtype), shape, dtype) for each in numbers)
    total = writer.binary("multiply", writer.binary("multiply", source, source), destination)
    total = writer.binary("add", total, length)
    update = writer.binary("add", writer.binary("subtract", state, state), total)
    hlo = writer.module([update], {0: 3})
    inputs = [InputBinding(each, "input", (1,), "int32") for each in names]
    inputs.append(InputBinding("kv_cache.key_0", "state", shape, dtype))
    outputs = (OutputBinding("kv_cache.key_0", shape, dtype, "kv_cache.key_0"),)
    return _graph("copy_slot", "copy_slot", hlo, inputs, outputs, ranks)


def _graph(
    name: str, kind: str, hlo: bytes, inputs: Sequence[InputBinding], outputs: Sequence[OutputBinding], ranks: int
) -> SmallGraph:
    digest = hashlib.sha256(hlo).hexdigest()
    return SmallGraph(name, kind, hlo, GraphIO(tuple(inputs), tuple(outputs), (), digest, ranks))


def _shape(dimensions: Sequence[int], dtype: str) -> bytes:
    layout = _bytes_field(1, bytes(range(len(dimensions) - 1, -1, -1)))
    return (
        _varint_field(2, ELEMENT_TYPES[dtype])
        + _bytes_field(3, b"".join(map(_varint, dimensions)))
        + _bytes_field(5, layout)
    )


def _attribute(key: str, value: str) -> bytes:
    entry = _bytes_field(1, key.encode()) + _bytes_field(2, value.encode())
    return _bytes_field(68, _bytes_field(1, entry))


def _bytes_field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint_field(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _varint(value: int) -> bytes:
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)
