# SPDX-License-Identifier: Apache-2.0
"""Writes small HLO modules: graphs for tests of what comes after lowering."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from optimum_neuron.targets.neuron.graphs import hlo
from optimum_neuron.targets.neuron.graphs.io import GraphIO, InputBinding, LoweredGraph, OutputBinding


class HloWriter:
    """Builds one entry computation of elementwise instructions on tensors of one shape."""

    def __init__(self, name: str) -> None:
        self._module = hlo._CLASSES["HloModule"](name=name, entry_computation_name=name)
        self._entry = self._module.computations.add(name=name)

    def parameter(self, name: str, shape: Sequence[int], dtype: str) -> int:
        program = self._entry.program_shape
        number = len(program.parameters)
        program.parameter_names.append(name)
        described = program.parameters.add(element_type=hlo.ELEMENT_TYPES[dtype], dimensions=shape)
        described.layout.minor_to_major.extend(reversed(range(len(shape))))
        attributes = {"neff_input_names": f"input{number}"}
        return self._add("parameter", described, (), attributes, name=name, parameter_number=number)

    def change(self, opcode: str, operand: int, shape: Sequence[int], dtype: str) -> int:
        """A conversion or a reshape."""
        number = self._add(opcode, self._shape(operand), (operand,), {})
        described = self._shape(number)
        described.element_type, described.dimensions[:] = hlo.ELEMENT_TYPES[dtype], shape
        described.layout.minor_to_major[:] = reversed(range(len(shape)))
        return number

    def binary(self, opcode: str, left: int, right: int) -> int:
        return self._add(opcode, self._shape(left), (left, right), {})

    def module(self, results: Sequence[int], aliases: Mapping[int, int]) -> bytes:
        """The serialized module; `aliases` is result index to parameter number."""
        entry, module = self._entry, self._module
        entry.program_shape.result.element_type = 13  # a tuple
        entry.program_shape.result.tuple_shapes.extend(map(self._shape, results))
        names = ",".join(f"output{index}" for index in range(len(results)))
        entry.root_id = self._add("tuple", entry.program_shape.result, results, {"neff_output_names": names})
        # Instructions and computations share one row of numbers.
        module.entry_computation_id = entry.id = entry.root_id + 1
        module.host_program_shape.CopyFrom(entry.program_shape)
        for result, number in aliases.items():
            entries = module.input_output_alias.entries
            entries.add(output_shape_index=[result], parameter_number=number, kind=hlo.MUST_ALIAS)
        return hlo.serialize(module)

    def _shape(self, number: int) -> Any:
        return self._entry.instructions[number - 1].shape

    def _add(
        self, opcode: str, shape: Any, operands: Sequence[int], attributes: Mapping[str, str], **fields: Any
    ) -> int:
        number = len(self._entry.instructions) + 1
        fields = {"name": f"{opcode}.{number}", "opcode": opcode, "id": number, "operand_ids": operands} | fields
        instruction = self._entry.instructions.add(shape=shape, **fields)
        for key, value in attributes.items():
            instruction.frontend_attributes.map.add(key=key, value=value)
        return number


def step_graph(
    name: str = "token_generation", *, size: int = 2, dtype: str = "float32", ranks: int = 1
) -> LoweredGraph:
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
        update = writer.binary("add", update, writer.change("convert", rank, shape, dtype))
    doubled = writer.binary("add", update, update)
    data = writer.module([doubled, update], {1: 1})
    outputs = (
        OutputBinding("decode.y", shape, dtype, None),
        OutputBinding("kv_cache.key_0", shape, dtype, "kv_cache.key_0"),
    )
    return _graph(name, "token_generation", data, inputs, outputs, ranks)


def copy_graph(*, dtype: str = "float32", ranks: int = 1) -> LoweredGraph:
    """In place of a copy of slots: the state, of one element, becomes `source * source * destination + length`."""
    shape = (1, 1, 1, 1)
    writer = HloWriter("copy_slot")
    names = ("copy.source", "copy.destination", "copy.length")
    numbers = [writer.parameter(each, (1,), "int32") for each in names]
    state = writer.parameter("kv_cache.key_0", shape, dtype)
    source, destination, length = (
        writer.change("reshape", writer.change("convert", each, (1,), dtype), shape, dtype) for each in numbers
    )
    total = writer.binary("multiply", writer.binary("multiply", source, source), destination)
    total = writer.binary("add", total, length)
    update = writer.binary("add", writer.binary("subtract", state, state), total)
    data = writer.module([update], {0: 3})
    inputs = [InputBinding(each, "input", (1,), "int32") for each in names]
    inputs.append(InputBinding("kv_cache.key_0", "state", shape, dtype))
    outputs = (OutputBinding("kv_cache.key_0", shape, dtype, "kv_cache.key_0"),)
    return _graph("copy_slot", "copy_slot", data, inputs, outputs, ranks)


def _graph(
    name: str, kind: str, data: bytes, inputs: Sequence[InputBinding], outputs: Sequence[OutputBinding], ranks: int
) -> LoweredGraph:
    digest = hashlib.sha256(data).hexdigest()
    return LoweredGraph(name, kind, data, GraphIO(tuple(inputs), tuple(outputs), (), digest, ranks))
