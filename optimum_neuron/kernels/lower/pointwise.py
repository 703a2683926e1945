# SPDX-License-Identifier: Apache-2.0
"""Which of torch's operators a Map computes, and how: each rounds as torch's does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..operators import NAMESPACE


aten = torch.ops.aten

# Results are of the operands' common type, by an operator on floats and one on integers.
ARITHMETIC: dict[Any, tuple[str, str | None]] = {
    aten.add.Tensor: ("add", "iadd"),
    aten.add.Scalar: ("add", "iadd"),
    aten.sub.Tensor: ("sub", "isub"),
    aten.sub.Scalar: ("sub", "isub"),
    aten.mul.Tensor: ("mul", "imul"),
    aten.mul.Scalar: ("mul", "imul"),
    aten.div.Tensor: ("div", None),
    aten.div.Scalar: ("div", None),
    aten.maximum.default: ("max", "imax"),
    aten.minimum.default: ("min", "imin"),
    aten.max.other: ("max", "imax"),
    aten.min.other: ("min", "imin"),
    aten.pow.Tensor_Tensor: ("pow", None),
}
# Those whose second operand torch takes as it is where that is a constant: others are rounded to the result's type.
KEEPS_CONSTANT = frozenset({aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar})
COMPARISONS: dict[Any, str] = {
    getattr(getattr(aten, name), overload): name
    for name in ("lt", "le", "gt", "ge", "eq", "ne")
    for overload in ("Tensor", "Scalar")
}
LOGICAL: dict[Any, str] = {
    aten.logical_and.default: "iand",
    aten.logical_or.default: "ior",
    aten.logical_xor.default: "ixor",
    aten.bitwise_and.Tensor: "iand",
    aten.bitwise_or.Tensor: "ior",
    aten.bitwise_xor.Tensor: "ixor",
    aten.bitwise_and.Scalar: "iand",
    aten.bitwise_or.Scalar: "ior",
    aten.__and__.Tensor: "iand",
    aten.__or__.Tensor: "ior",
    aten.__xor__.Tensor: "ixor",
    aten.__and__.Scalar: "iand",
    aten.__or__.Scalar: "ior",
}
UNARY: dict[Any, str] = {
    aten.neg.default: "neg",
    aten.abs.default: "abs",
    aten.exp.default: "exp",
    aten.log.default: "log",
    aten.sqrt.default: "sqrt",
    aten.rsqrt.default: "rsqrt",
    aten.reciprocal.default: "reciprocal",
    aten.sigmoid.default: "sigmoid",
    aten.silu.default: "silu",
    aten.tanh.default: "tanh",
    aten.erf.default: "erf",
    aten.relu.default: "relu",
    aten.sin.default: "sin",
    aten.cos.default: "cos",
    aten.floor.default: "floor",
    aten.ceil.default: "ceil",
    aten.round.default: "round",
    aten.trunc.default: "trunc",
    aten.expm1.default: "expm1",
    aten.log1p.default: "log1p",
}
# The first operand itself.
ALIASES = frozenset(
    {aten.alias.default, aten.detach.default, aten.detach_.default, aten.dropout.default, aten.lift_fresh.default}
)
# A copy of it, which may be itself where nobody writes to either.
COPIES = frozenset({aten.clone.default, aten.lift_fresh_copy.default})
CONVERSIONS = frozenset(
    {
        aten.to.dtype,
        aten.to.dtype_layout,
        aten.to.device,
        aten.to.other,
        aten.type_as.default,
        aten._to_copy.default,
    }
)
REDUCING: dict[Any, tuple[str, str]] = {
    aten.sum.dim_IntList: ("sum", "isum"),
    aten.sum.default: ("sum", "isum"),
    aten.mean.dim: ("sum", ""),
    aten.mean.default: ("sum", ""),
    aten.amax.default: ("row_max", "irow_max"),
    aten.amin.default: ("row_min", "irow_min"),
    aten.max.default: ("row_max", "irow_max"),
    aten.min.default: ("row_min", "irow_min"),
    aten.any.dim: ("", "irow_max"),
    aten.all.dim: ("", "irow_min"),
}
MEANS = frozenset({aten.mean.dim, aten.mean.default})
# Results that share their first operand's memory, wherever its layout allows it.
VIEWS: frozenset[Any] = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.flatten.using_ints,
        aten.unflatten.int,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.transpose.int,
        aten.permute.default,
        aten.t.default,
        aten.numpy_T.default,
        aten.mT.default,
        aten.movedim.int,
        aten.movedim.intlist,
        aten.swapaxes.default,
        aten.swapdims.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.narrow.default,
        aten.expand.default,
        aten.expand_as.default,
        aten.broadcast_to.default,
        aten.view_as.default,
        aten.reshape_as.default,
        aten.split.Tensor,
        aten.split.sizes,
        aten.split_with_sizes.default,
        aten.chunk.default,
        aten.tensor_split.sections,
        aten.unbind.int,
        aten.diagonal.default,
        aten.unfold.default,
    }
)
# New tensors of which only the shape follows from the operand.
SHAPED: dict[Any, Callable[..., torch.Tensor]] = {
    aten.new_zeros.default: torch.zeros,
    aten.new_ones.default: torch.ones,
    aten.zeros_like.default: torch.zeros,
    aten.ones_like.default: torch.ones,
}
FILLED = frozenset({aten.new_full.default, aten.full_like.default})
# Of which not even the elements matter, until something is written.
UNDEFINED = frozenset({aten.new_empty.default, aten.empty_like.default, aten.empty.memory_format})
# Results that are their operands side by side.
JOINING = frozenset({aten.cat.default, aten.stack.default, aten.concat.default})
# Of each row of 2n columns, the second half negated, and then the first; only a plan has it.
ROTATE_HALF = getattr(torch.ops, NAMESPACE).rotate_half.default
# What becomes operators of a Map.
MAPPED: frozenset[Any] = frozenset(
    {
        ROTATE_HALF,
        *ARITHMETIC,
        *COMPARISONS,
        *LOGICAL,
        *UNARY,
        *REDUCING,
        *CONVERSIONS,
        *COPIES,
        aten.contiguous.default,
        aten.copy_.default,
        aten.where.self,
        aten.where.ScalarSelf,
        aten.where.ScalarOther,
        aten.where.Scalar,
        aten.masked_fill.Scalar,
        aten.masked_fill.Tensor,
        aten.logical_not.default,
        aten.bitwise_not.default,
        aten.isnan.default,
        aten.gelu.default,
        aten.pow.Tensor_Scalar,
        aten.square.default,
        aten.rsub.Scalar,
        aten.clamp.default,
        aten.clamp_min.default,
        aten.clamp_max.default,
        aten.softmax.int,
        aten._softmax.default,
        aten.layer_norm.default,
        aten.softplus.default,
    }
)
