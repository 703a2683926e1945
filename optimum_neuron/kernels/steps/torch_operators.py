# SPDX-License-Identifier: Apache-2.0
"""Torch's operators that a plan may call, and their arguments: an artifact is data, and names them.

The list is closed: what the compiler emits for the architectures that tests compile, and what is next to it, elementwise operators and
views. Each computes its results from its operands alone, and checks their sizes and indices in torch's release builds, but for what
`check_arguments` adds. A name ends with "_" where an operator writes to its first operand.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .access import PlanError, require


_ELEMENTWISE = """
    abs.default absolute.default add.Scalar add.Tensor bitwise_and.Scalar bitwise_and.Tensor bitwise_not.default bitwise_or.Scalar bitwise_or.Tensor
    bitwise_xor.Scalar bitwise_xor.Tensor ceil.default clamp.default clamp.Tensor clamp_max.default clamp_min.default copysign.Tensor cos.default
    div.Scalar div.Scalar_mode div.Tensor div.Tensor_mode divide.Scalar divide.Tensor eq.Scalar eq.Tensor erf.default erfinv.default exp.default expm1.default
    floor.default floor_divide.Scalar floor_divide.default ge.Scalar ge.Tensor gelu.default gt.Scalar gt.Tensor isnan.default
    le.Scalar le.Tensor log.default log1p.default logical_and.default logical_not.default logical_or.default logical_xor.default
    lt.Scalar lt.Tensor masked_fill.Scalar masked_fill.Tensor max.other maximum.default min.other minimum.default mul.Scalar mul.Tensor
    multiply.Scalar multiply.Tensor ne.Scalar ne.Tensor neg.default negative.default polar.default pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor
    reciprocal.default relu.default remainder.Scalar remainder.Tensor round.default rsqrt.default rsub.Scalar rsub.Tensor
    sigmoid.default silu.default sin.default softplus.default sqrt.default square.default sub.Scalar sub.Tensor subtract.Scalar subtract.Tensor tanh.default
    tril.default triu.default trunc.default where.Scalar where.ScalarOther where.ScalarSelf where.self
"""
_SHAPES = """
    _unsafe_view.default alias.default broadcast_tensors.default broadcast_to.default cat.default chunk.default clone.default
    concat.default concatenate.default contiguous.default detach.default diagonal.default dropout.default expand.default expand_as.default
    flatten.using_ints flip.default lift_fresh.default lift_fresh_copy.default mT.default movedim.int movedim.intlist narrow.default
    numpy_T.default pad.default permute.default repeat.default repeat_interleave.self_int reshape.default reshape_as.default
    roll.default select.int slice.Tensor split.Tensor split.sizes split_with_sizes.default squeeze.default squeeze.dim squeeze.dims
    stack.default swapaxes.default swapdims.default t.default tensor_split.sections to.dtype transpose.int unbind.int unflatten.int
    unfold.default unsqueeze.default view.default view_as.default view_as_complex.default view_as_real.default
"""
_ROWS = """
    _softmax.default all.dim amax.default amin.default any.dim argmax.default cumsum.default layer_norm.default linalg_vector_norm.default log_softmax.int
    logsumexp.default max.default max.dim mean.default mean.dim min.default min.dim rms_norm.default softmax.int sort.default std.dim
    sum.default sum.dim_IntList topk.default var.dim
"""
_PRODUCTS = """
    addmm.default baddbmm.default bmm.default conv1d.default linear.default matmul.default mm.default mv.default scaled_dot_product_attention.default
"""
_IN_PLACE = """
    add_.Scalar add_.Tensor bitwise_and_.Tensor bitwise_or_.Tensor clamp_.default clamp_max_.default clamp_min_.default copy_.default
    div_.Scalar div_.Tensor exp_.default fill_.Scalar logical_and_.default logical_not_.default logical_or_.default
    masked_fill_.Scalar masked_fill_.Tensor mul_.Scalar mul_.Tensor neg_.default relu_.default rsqrt_.default sigmoid_.default
    silu_.default sqrt_.default sub_.Scalar sub_.Tensor tanh_.default tril_.default triu_.default zero_.default
"""
_INDEXED_BY_SECOND = "embedding.default index.Tensor index_put_.default"
_INDEXED_BY_THIRD = """
    gather.default index_add_.default index_copy_.default index_fill_.int_Scalar index_select.default
    scatter.src scatter.value scatter_.src scatter_.value scatter_add_.default
"""
# Which of an operator's arguments are indices: whole numbers, not a mask.
INDEXED = {
    f"aten.{name}": place
    for place, names in ((1, _INDEXED_BY_SECOND), (2, _INDEXED_BY_THIRD))
    for name in names.split()
}
_OTHERS = f"{_ELEMENTWISE} {_SHAPES} {_ROWS} {_PRODUCTS} {_IN_PLACE}"
OPERATORS = frozenset([*INDEXED, *(f"aten.{name}" for name in _OTHERS.split())])
_WHOLE_NUMBERS = (torch.int32, torch.int64)
# The least number of a type divided by -1 stops a process.
_DIVISIONS = (
    "div.Scalar_mode div.Tensor_mode floor_divide.Scalar floor_divide.default remainder.Scalar remainder.Tensor"
)
_TEXTS = ("constant", "floor", "none", "tanh", "trunc")


def resolve(name: str) -> torch._ops.OpOverload:
    """Return an operator by its name, as "aten.topk.default".

    Raises:
        PlanError: a plan may not call it.
    """
    if name not in OPERATORS:
        raise PlanError(f"it calls {name!r}, which is no operator that a plan may call")
    _, function, overload = name.split(".")
    operator: torch._ops.OpOverload = getattr(getattr(torch.ops.aten, function), overload)
    return operator


def check_arguments(name: str, arguments: list[Any], keywords: dict[str, Any]) -> None:
    """Check what torch does not check, or finds only when it reads its operands.

    Raises:
        PlanError: an argument is none that the operator may get.
    """
    declared = resolve(name)._schema.arguments
    for value, each in zip(arguments, declared, strict=False):
        absent = each.type.kind() == "TensorType" and not isinstance(value, Tensor | int | float)
        require(not absent, f"its call of {name} has no tensor as {each.name}")
    texts = [each for each in (*arguments, *keywords.values()) if isinstance(each, str)]
    require(all(each in _TEXTS for each in texts), f"its call of {name} has the text {texts}")
    if name in INDEXED:
        found = arguments[INDEXED[name]] if INDEXED[name] < len(arguments) else None
        indices = [each for each in (found if isinstance(found, list) else [found]) if each is not None]
        whole = bool(indices) and all(isinstance(each, Tensor) and each.dtype in _WHOLE_NUMBERS for each in indices)
        require(whole, f"its call of {name} has no whole numbers as indices")
    if name.removeprefix("aten.") in _DIVISIONS.split():
        divided, by = (*arguments, None, None)[:2]
        floats = isinstance(divided, Tensor) and divided.is_floating_point()
        positive = isinstance(by, int | float) and by > 0
        require(floats or positive, f"its call of {name} divides whole numbers by what may be no number above 0")
    if name == "aten.scaled_dot_product_attention.default":
        query, keys, values = (*arguments, None, None, None)[:3]
        shapes = [list(each.shape) if isinstance(each, Tensor) else [] for each in (query, keys, values)]
        fit = len(shapes[0]) == 4 and shapes[0][:2] == shapes[1][:2] and shapes[0][3:] == shapes[1][3:]
        require(fit and shapes[1][:3] == shapes[2][:3], f"its call of {name} has operands of {shapes}")
