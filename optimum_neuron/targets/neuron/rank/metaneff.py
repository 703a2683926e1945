# SPDX-License-Identifier: Apache-2.0
"""MetaNeff: what torch-neuronx's runtime wants to know of a graph's tensors, made from the graph's own description.

It is what torch-neuronx makes when it traces a module itself: parameters as user inputs, states and weights, in this order.
"""

from __future__ import annotations

from typing import Any

from .plan import Graph


_TYPES = {"input": "USER_INPUT", "state": "INPUT_STATE", "weight": "INPUT_WEIGHT"}
_DATA_TYPES = {
    "float32": "FLOAT",
    "bfloat16": "BFLOAT16",
    "float16": "FLOAT16",
    "int32": "INT32",
    "int64": "INT64",
    "int8": "INT8",
    "uint8": "UINT8",
    "bool": "BOOL",
}


def build_metaneff(graph: Graph, schema: Any) -> Any:
    """A MetaNeff message.

    Args:
        schema: `torch_neuronx.proto.metaneff_pb2`.

    Raises:
        ValueError: the parameters are in another order, or have a type that the runtime does not know.
    """
    roles = [binding.role for binding in graph.inputs]
    if roles != sorted(roles, key=list(_TYPES).index):
        raise ValueError(
            "neuronx-distributed takes inputs before states before weights; lower the graph in this order"
        )
    message = schema.MetaNeff()
    for index, binding in enumerate(graph.inputs):
        tensor = _add(message.input_tensors, f"input{index}", binding, schema)
        tensor.type = getattr(schema.MetaTensor.Type, _TYPES[binding.role])
        if binding.role == "input":
            tensor.user_input_key = binding.name.encode()
        else:
            tensor.checkpoint_key = binding.name.encode()
    positions = {binding.name: index for index, binding in enumerate(graph.inputs)}
    for index, output in enumerate(graph.outputs):
        _add(message.output_tensors, f"output{index}", output, schema)
        if output.alias_of is not None:
            message.output_aliases_to[index] = positions[output.alias_of]
    return message


def _add(tensors: Any, name: str, binding: Any, schema: Any) -> Any:
    if binding.dtype not in _DATA_TYPES:
        raise ValueError(
            f"{binding.name} has type {binding.dtype}, which torch-neuronx does not take; use {', '.join(_DATA_TYPES)}"
        )
    tensor = tensors.add()
    tensor.name = name.encode()
    tensor.shape.extend(binding.shape)
    tensor.data_type = getattr(schema.MetaTensor.DataType, _DATA_TYPES[binding.dtype])
    return tensor
