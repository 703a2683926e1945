# SPDX-License-Identifier: Apache-2.0
"""HloModuleProto, in which a graph reaches the Neuron compiler: parsed, walked and written by protobuf.

The schema has only the fields that this package reads or writes; protobuf keeps the others as they are. Field numbers are
those of xla/service/hlo.proto and xla/xla_data.proto of OpenXLA.
"""

from __future__ import annotations

import copy
import math
import re
import struct
from collections.abc import Iterable, Iterator
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError


# Message: fields as name, number and type; "*" marks a repeated field, a name in capitals another message.
_SCHEMA: dict[str, str] = {
    "HloModule": (
        "name=1:string entry_computation_name=2:string computations=3:*HloComputation "
        "host_program_shape=4:ProgramShape id=5:int64 entry_computation_id=6:int64 "
        "input_output_alias=8:AliasConfig stack_frame_index=17:Opaque"
    ),
    "HloComputation": (
        "name=1:string instructions=2:*HloInstruction program_shape=4:ProgramShape id=5:int64 root_id=6:int64"
    ),
    "HloInstruction": (
        "name=1:string opcode=2:string shape=3:Shape metadata=7:OpMetadata literal=8:Literal "
        "parameter_number=9:int64 tuple_index=13:int64 dimensions=14:*int64 window=15:Window "
        "convolution_dimension_numbers=16:ConvolutionDimensions slice_dimensions=17:*SliceDimensions "
        "padding_config=21:PaddingConfig channel_id=26:int64 custom_call_target=28:string "
        "dot_dimension_numbers=30:DotDimensions gather_dimension_numbers=33:GatherDimensions "
        "gather_slice_sizes=34:*int64 id=35:int64 operand_ids=36:*int64 control_predecessor_ids=37:*int64 "
        "called_computation_ids=38:*int64 backend_config=43:bytes scatter_dimension_numbers=48:ScatterDimensions "
        "replica_groups=49:*ReplicaGroup frontend_attributes=68:FrontendAttributes rng_algorithm=70:int32"
    ),
    "Shape": (
        "element_type=2:int32 dimensions=3:*int64 tuple_shapes=4:*Shape layout=5:Layout is_dynamic_dimension=6:*bool"
    ),
    "Layout": "minor_to_major=1:*int64 tail_padding_alignment_in_elements=16:int64",
    "ProgramShape": "parameters=1:*Shape result=2:Shape parameter_names=3:*string",
    "OpMetadata": "op_type=1:string op_name=2:string",
    "Literal": (
        "shape=1:Shape preds=2:*bool u8s=3:bytes s32s=4:*int32 s64s=5:*int64 u32s=6:*uint32 f32s=8:*float "
        "f64s=9:*double f16s=11:bytes bf16s=13:bytes s8s=15:bytes"
    ),
    "SliceDimensions": "start=1:int64 limit=2:int64 stride=3:int64",
    "Window": "dimensions=1:*WindowDimension",
    "WindowDimension": "size=1:int64 stride=2:int64 window_dilation=5:int64 base_dilation=6:int64",
    "PaddingConfig": "dimensions=1:*PaddingDimension",
    "PaddingDimension": "interior_padding=3:int64",
    "ConvolutionDimensions": "kernel_output_feature_dimension=4:int64",
    "DotDimensions": (
        "lhs_contracting_dimensions=1:*int64 rhs_contracting_dimensions=2:*int64 lhs_batch_dimensions=3:*int64 "
        "rhs_batch_dimensions=4:*int64"
    ),
    "GatherDimensions": (
        "offset_dims=1:*int64 collapsed_slice_dims=2:*int64 start_index_map=3:*int64 index_vector_dim=4:int64"
    ),
    "ScatterDimensions": (
        "update_window_dims=1:*int64 inserted_window_dims=2:*int64 scatter_dims_to_operand_dims=3:*int64 "
        "index_vector_dim=4:int64"
    ),
    "ReplicaGroup": "replica_ids=1:*int64",
    "AliasConfig": "entries=1:*AliasEntry",
    "AliasEntry": "output_shape_index=1:*int64 parameter_number=2:int64 parameter_shape_index=3:*int64 kind=4:int32",
    "FrontendAttributes": "map=1:*FrontendAttributesEntry",
    "FrontendAttributesEntry": "key=1:string value=2:string",
    "Opaque": "",
}
# Element types (xla_data.proto, PrimitiveType) by torch's names, and those that torch has none for by XLA's.
ELEMENT_TYPES = {
    "bool": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint8": 6, "uint16": 7, "uint32": 8, "uint64": 9,
    "float16": 10, "float32": 11, "float64": 12, "complex64": 15, "bfloat16": 16, "complex128": 18,
    "float8_e5m2": 19, "float8_e4m3fn": 20, "float8_e4m3b11fnuz": 23, "float8_e5m2fnuz": 24, "float8_e4m3fnuz": 25,
    "float8_e4m3": 28,
}  # fmt: skip
TYPE_NAMES = {number: name for name, number in ELEMENT_TYPES.items()} | {13: "tuple", 14: "opaque", 17: "token"}
MUST_ALIAS = 2
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def _module_class() -> Any:
    name = "optimum_neuron/hlo.proto"
    file = descriptor_pb2.FileDescriptorProto(name=name, package="optimum_neuron", syntax="proto3")
    scalar = descriptor_pb2.FieldDescriptorProto
    for message, fields in _SCHEMA.items():
        described = file.message_type.add(name=message)
        for each in fields.split():
            name, _, number, repeated, kind = re.split(r"=|:(\*?)", each)
            entry = described.field.add(name=name, number=int(number))
            entry.label = scalar.LABEL_REPEATED if repeated else scalar.LABEL_OPTIONAL
            if kind in _SCHEMA:
                entry.type, entry.type_name = scalar.TYPE_MESSAGE, f".optimum_neuron.{kind}"
            else:
                entry.type = getattr(scalar, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("optimum_neuron.HloModule"))


_MODULE = _module_class()


def parse(data: bytes) -> Any:
    """Return an HloModule, or raise ValueError where the bytes are none."""
    module = _MODULE()
    try:
        module.ParseFromString(data)
    except DecodeError as error:
        raise ValueError(f"these {len(data):,} bytes are no HLO module: {error}") from error
    if not any(computation.id == module.entry_computation_id for computation in module.computations):
        raise ValueError(f"these {len(data):,} bytes are no HLO module: it has no entry computation")
    return module


def serialize(module: Any) -> bytes:
    """Return the module's bytes, the same for the same contents."""
    data: bytes = module.SerializeToString(deterministic=True)
    return data


def entry(module: Any) -> Any:
    return next(each for each in module.computations if each.id == module.entry_computation_id)


def instructions(module: Any) -> Iterator[tuple[Any, Any]]:
    for computation in module.computations:
        for instruction in computation.instructions:
            yield computation, instruction


def parameters(module: Any) -> list[Any]:
    found = [each for each in entry(module).instructions if each.opcode == "parameter"]
    return sorted(found, key=lambda each: each.parameter_number)


def results(module: Any) -> list[Any]:
    computation = entry(module)
    roots = (each for each in computation.instructions if each.id == computation.root_id)
    return [shape for root in roots for shape in root.shape.tuple_shapes]


def find_root(computation: Any) -> Any:
    return next(each for each in computation.instructions if each.id == computation.root_id)


def replace_items(field: Any, items: Iterable[Any]) -> None:
    """Make the messages of a repeated field be these, which may be some of its own."""
    copies = [copy.deepcopy(each) for each in items]
    del field[:]
    field.extend(copies)


def all_ids(module: Any) -> list[int]:
    """Return the ids of instructions, then those of computations: XLA looks both up in one table."""
    return [each.id for _, each in instructions(module)] + [each.id for each in module.computations]


def array(shape: Any) -> tuple[tuple[int, ...], str]:
    return tuple(shape.dimensions), dtype_name(shape)


def dtype_name(shape: Any) -> str:
    """Return torch's name of a shape's element type, or XLA's where torch has none."""
    return TYPE_NAMES.get(shape.element_type, f"type {shape.element_type}")


def byte_count(shape: Any) -> int:
    name = dtype_name(shape)
    bits = {"bool": 8, "complex64": 64, "complex128": 128}.get(name)
    if bits is None:
        digits = "".join(c for c in name.split("_")[0] if c.isdigit())
        bits = int(digits) if digits else 0
    return math.prod(shape.dimensions) * bits // 8


def literal_values(constant: Any) -> Iterator[float]:
    """Yield the numbers of a constant of any type that narrow modules have."""
    literal = constant.literal
    yield from (*literal.preds, *literal.u8s, *literal.s32s, *literal.f32s)
    yield from (value for (value,) in struct.iter_unpack("<e", literal.f16s))
    for (half,) in struct.iter_unpack("<2s", literal.bf16s):  # the upper half of a float32
        yield from struct.unpack("<f", b"\0\0" + half)


def module_path(instruction: Any) -> str:
    """Return the dotted name of the model's module that an instruction comes from; empty where it is unknown."""
    scope: str = instruction.metadata.op_name.rpartition("/")[0]
    return scope
