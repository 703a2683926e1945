# SPDX-License-Identifier: Apache-2.0
"""Which of torch's operators a plan may call: an artifact is data, and names them."""

from __future__ import annotations

import torch


# What writes to its first operand, and changes nothing else of it.
_WRITERS = frozenset(
    [
        "copy_",
        "fill_",
        "zero_",
        "add_",
        "sub_",
        "mul_",
        "div_",
        "clamp_",
        "clamp_min_",
        "clamp_max_",
        "masked_fill_",
        "scatter_",
        "scatter_add_",
        "index_put_",
        "index_copy_",
        "index_add_",
        "index_fill_",
        "neg_",
        "exp_",
        "sigmoid_",
        "relu_",
        "silu_",
        "tanh_",
        "pow_",
        "sqrt_",
        "rsqrt_",
        "tril_",
        "triu_",
        "logical_not_",
        "logical_and_",
        "logical_or_",
        "bitwise_and_",
        "bitwise_or_",
    ]
)


def is_callable(operator: torch._ops.OpOverload) -> bool:
    """Whether an operator computes tensors from tensors, and touches nothing but its results."""
    schema = operator._schema
    if operator.namespace != "aten" or not any(_is_tensor(str(each.type)) for each in schema.arguments):
        return False
    if not schema.returns or not all(_is_tensor(str(each.type)) for each in schema.returns):
        return False
    written = [each for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    name = schema.name.removeprefix("aten::")
    return not written or (written == schema.arguments[:1] and name in _WRITERS)


def _is_tensor(kind: str) -> bool:
    return kind in ("Tensor", "List[Tensor]", "Optional[Tensor]", "List[Optional[Tensor]]")


def resolve(name: str) -> torch._ops.OpOverload:
    """An operator by its name, as "aten.topk.default".

    Raises:
        ValueError: a plan may not call it.
    """
    parts = name.split(".")
    operator = None
    if len(parts) == 3 and parts[0] == "aten" and not parts[1].startswith("__"):
        operator = getattr(getattr(torch.ops.aten, parts[1], None), parts[2], None)
    if not isinstance(operator, torch._ops.OpOverload) or not is_callable(operator):
        raise ValueError(f"it calls {name!r}, which is no operator that a plan may call")
    return operator
