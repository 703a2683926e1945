# SPDX-License-Identifier: Apache-2.0
"""Nodes that stay calls of torch's operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from ..run.memory import dtype_name
from ..steps.access import PlanError
from ..steps.steps import Operand, TorchCall
from ..steps.torch_operators import OPERATORS, check_arguments
from .builder import PlanBuilder, arguments
from .pointwise import ALIASES, CONVERSIONS, aten


# Arguments for the place of a result: a plan has its own.
_PLACEMENT = ("device", "pin_memory", "layout")


def writes(node: Node) -> bool:
    """Return whether a node writes to the elements of one of its operands."""
    mutable = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
    return mutable and node.target not in ALIASES


def lower_torch_call(builder: PlanBuilder, node: Node) -> None:
    """Lower a node to a call of torch's operator; its results are copied to buffers of the plan.

    Raises:
        PlanError: no plan may call the operator.
    """
    assert isinstance(node.target, torch._ops.OpOverload)
    if node.target not in CONVERSIONS:  # which become one operator of the list
        name = str(node.target)
        if name not in OPERATORS:
            raise PlanError(
                f"it calls {name}, which is not in the closed list of operators that an artifact of the cpu target may call "
                f"(kernels/steps/torch_operators.py); export with target='eager'"
            )
        check_arguments(name, *map_arg((list(arguments(node)), dict(node.kwargs)), builder.fake))
    if writes(node):
        builder.close_groups()
        target = builder.stored(arguments(node)[0])
        builder.steps.append(_call(builder, node, ()))
        builder.values[node] = target
        return
    fakes = node.meta["val"]
    is_single = isinstance(fakes, Tensor)
    for source in node.all_input_nodes:
        builder.stored(source)
    results = [fakes] if is_single else fakes
    outputs = [builder.allocate(each.shape, each.dtype) if isinstance(each, Tensor) else None for each in results]
    places = tuple(None if each is None else each.as_operand() for each in outputs)
    builder.steps.append(_call(builder, node, places))
    builder.values[node] = outputs[0] if is_single else outputs


def _call(builder: PlanBuilder, node: Node, outputs: tuple[Operand | None, ...]) -> TorchCall:
    if node.target in CONVERSIONS:  # whatever else it says of where to
        taken = [arguments(node)[0], builder.fake(node).dtype]
        return TorchCall(str(aten.to.dtype), _argument(builder, taken), {}, outputs)
    keywords = {name: _argument(builder, each) for name, each in node.kwargs.items() if name not in _PLACEMENT}
    return TorchCall(str(node.target), _argument(builder, arguments(node)), keywords, outputs)


def _argument(builder: PlanBuilder, value: Any) -> Any:
    if isinstance(value, Node):
        return {"tensor": builder.stored(value).as_operand()}
    if isinstance(value, list | tuple):
        return [_argument(builder, each) for each in value]
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return {"number": str(value)}
    if isinstance(value, torch.memory_format | torch.layout | torch.device):
        return None
    return value
