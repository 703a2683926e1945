# SPDX-License-Identifier: Apache-2.0
"""Torch's operators that a Map computes; each rounds as torch's does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from ..operators import NAMESPACE


aten = torch.ops.aten


def _list(text: str) -> list[Any]:
    """Return the operators that a text names, as "add.Tensor"."""
    return [
        getattr(getattr(aten, name), overload) for name, _, overload in (each.partition(".") for each in text.split())
    ]


# Results have the operands' common type, by an operator on floats and one on integers.
ARITHMETIC: dict[Any, tuple[str, str | None]] = {
    each: (op, integer_op)
    for op, integer_op, names in (
        ("add", "iadd", "add.Tensor add.Scalar"),
        ("sub", "isub", "sub.Tensor sub.Scalar"),
        ("mul", "imul", "mul.Tensor mul.Scalar multiply.Tensor"),
        ("div", None, "div.Tensor div.Scalar"),
        ("max", "imax", "maximum.default max.other"),
        ("min", "imin", "minimum.default min.other"),
        ("pow", None, "pow.Tensor_Tensor"),
    )
    for each in _list(names)
}
# Torch takes their second operand as it is where it is a constant; others are rounded to the result's type.
KEEPS_CONSTANT = frozenset(_list("mul.Tensor mul.Scalar multiply.Tensor div.Tensor div.Scalar"))
# Of whole numbers by one above 0, rounded down; and what they leave.
DIVISIONS = frozenset(_list("floor_divide.default floor_divide.Scalar div.Tensor_mode div.Scalar_mode"))
REMAINDERS = frozenset(_list("remainder.Scalar remainder.Tensor"))
COMPARISONS: dict[Any, str] = {
    each: name for name in ("lt", "le", "gt", "ge", "eq", "ne") for each in _list(f"{name}.Tensor {name}.Scalar")
}
LOGICAL: dict[Any, str] = {
    each: f"i{name}"
    for name in ("and", "or", "xor")
    for each in _list(
        f"logical_{name}.default bitwise_{name}.Tensor bitwise_{name}.Scalar __{name}__.Tensor __{name}__.Scalar"
    )
}
_UNARY = "neg abs exp log sqrt rsqrt reciprocal sigmoid silu tanh erf relu sin cos floor ceil round trunc expm1 log1p"
UNARY: dict[Any, str] = {getattr(aten, name).default: name for name in _UNARY.split()}
# The first operand itself.
ALIASES = frozenset(_list("alias.default detach.default detach_.default dropout.default lift_fresh.default"))
# A copy of it, which may be itself where nothing writes to either.
COPIES = frozenset(_list("clone.default lift_fresh_copy.default"))
CONVERSIONS = frozenset(_list("to.dtype to.dtype_layout to.device to.other type_as.default _to_copy.default"))
REDUCING: dict[Any, tuple[str, str]] = {
    each: ops
    for ops, names in (
        (("sum", "isum"), "sum.dim_IntList sum.default"),
        (("sum", ""), "mean.dim mean.default"),
        (("row_max", "irow_max"), "amax.default max.default"),
        (("row_min", "irow_min"), "amin.default min.default"),
        (("", "irow_max"), "any.dim"),
        (("", "irow_min"), "all.dim"),
    )
    for each in _list(names)
}
MEANS = frozenset(_list("mean.dim mean.default"))
# Views that only add or drop dimensions of size 1, where the other sizes stay.
RESHAPES: frozenset[Any] = frozenset(
    _list(
        "view.default reshape.default _unsafe_view.default flatten.using_ints unflatten.int unsqueeze.default squeeze.default "
        "squeeze.dim squeeze.dims expand.default"
    )
)
# Results that share their first operand's memory, wherever its layout allows it.
VIEWS = RESHAPES.union(
    _list(
        "transpose.int permute.default t.default numpy_T.default mT.default movedim.int movedim.intlist swapaxes.default "
        "swapdims.default select.int slice.Tensor narrow.default expand_as.default broadcast_to.default view_as.default "
        "reshape_as.default split.Tensor split.sizes split_with_sizes.default chunk.default tensor_split.sections "
        "unbind.int diagonal.default unfold.default"
    )
)
# New tensors of which only the shape follows from the operand.
SHAPED: dict[Any, Callable[..., torch.Tensor]] = {
    aten.new_zeros.default: torch.zeros,
    aten.new_ones.default: torch.ones,
    aten.zeros_like.default: torch.zeros,
    aten.ones_like.default: torch.ones,
}
FILLED = frozenset(_list("new_full.default full_like.default"))
# Of which not even the elements matter, until something is written.
UNDEFINED = frozenset(_list("new_empty.default empty_like.default empty.memory_format"))
# Results that are their operands side by side.
JOINING = frozenset(_list("cat.default stack.default concat.default concatenate.default"))
# Of each row of 2n columns, the second half negated, and then the first; only a plan has it.
ROTATE_HALF = getattr(torch.ops, NAMESPACE).rotate_half.default


def find_divisor(node: Node) -> int | None:
    """Return the number above 0 by which a node divides whole numbers, rounding down; None where it does something else."""
    if node.target not in DIVISIONS | REMAINDERS or node.kwargs.get("rounding_mode", "floor") != "floor":
        return None
    divisor: Any = node.args[1]
    return divisor if type(divisor) is int and 0 < divisor < 1 << 31 else None
