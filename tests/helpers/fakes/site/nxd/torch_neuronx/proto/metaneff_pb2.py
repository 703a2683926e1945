# SPDX-License-Identifier: Apache-2.0
"""The messages of metaneff.proto, as far as they are used, with the field numbers of torch-neuronx."""

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.internal import enum_type_wrapper


_FIELD = descriptor_pb2.FieldDescriptorProto
_DATA_TYPES = {
    "UNDEFINED": 0, "FLOAT": 1, "INT32": 2, "BYTE": 3, "STRING": 4, "BOOL": 5, "UINT8": 6, "INT8": 7, "UINT16": 8,
    "INT16": 9, "INT64": 10, "FLOAT16": 12, "DOUBLE": 13, "BFLOAT16": 14, "F8E4M3FN": 15, "F8E5M2": 16,
}  # fmt: skip
_TYPES = {"UNDEFINED_TYPE": 0, "USER_INPUT": 1, "INPUT_STATE": 2, "INPUT_WEIGHT": 3}


def _field(message, name, number, kind, *, repeated=False, message_type=None):
    field = message.field.add(name=name, number=number, type=kind)
    field.label = _FIELD.LABEL_REPEATED if repeated else _FIELD.LABEL_OPTIONAL
    if message_type is not None:
        field.type_name = message_type


def _enum(message, name, values):
    enum = message.enum_type.add(name=name)
    for key, number in values.items():
        enum.value.add(name=key, number=number)


def _build():
    file = descriptor_pb2.FileDescriptorProto(name="metaneff.proto", package="metaneff", syntax="proto3")
    tensor = file.message_type.add(name="MetaTensor")
    _enum(tensor, "DataType", _DATA_TYPES)
    _enum(tensor, "Type", _TYPES)
    _field(tensor, "name", 1, _FIELD.TYPE_BYTES)
    _field(tensor, "shape", 2, _FIELD.TYPE_INT64, repeated=True)
    _field(tensor, "data_type", 3, _FIELD.TYPE_ENUM, message_type=".metaneff.MetaTensor.DataType")
    _field(tensor, "checkpoint_key", 6, _FIELD.TYPE_BYTES)
    _field(tensor, "type", 7, _FIELD.TYPE_ENUM, message_type=".metaneff.MetaTensor.Type")
    _field(tensor, "user_input_key", 8, _FIELD.TYPE_BYTES)
    neff = file.message_type.add(name="MetaNeff")
    entry = neff.nested_type.add(name="OutputAliasesToEntry")
    entry.options.map_entry = True
    _field(entry, "key", 1, _FIELD.TYPE_INT64)
    _field(entry, "value", 2, _FIELD.TYPE_INT64)
    _field(neff, "input_tensors", 1, _FIELD.TYPE_MESSAGE, repeated=True, message_type=".metaneff.MetaTensor")
    _field(neff, "output_tensors", 2, _FIELD.TYPE_MESSAGE, repeated=True, message_type=".metaneff.MetaTensor")
    _field(neff, "serialized_graph_def", 4, _FIELD.TYPE_BYTES)
    _field(neff, "name", 5, _FIELD.TYPE_BYTES)
    aliases = ".metaneff.MetaNeff.OutputAliasesToEntry"
    _field(neff, "output_aliases_to", 6, _FIELD.TYPE_MESSAGE, repeated=True, message_type=aliases)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


_POOL = _build()
MetaTensor = message_factory.GetMessageClass(_POOL.FindMessageTypeByName("metaneff.MetaTensor"))
MetaNeff = message_factory.GetMessageClass(_POOL.FindMessageTypeByName("metaneff.MetaNeff"))
# As generated code has them.
MetaTensor.DataType = enum_type_wrapper.EnumTypeWrapper(_POOL.FindEnumTypeByName("metaneff.MetaTensor.DataType"))
MetaTensor.Type = enum_type_wrapper.EnumTypeWrapper(_POOL.FindEnumTypeByName("metaneff.MetaTensor.Type"))
