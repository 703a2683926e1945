# SPDX-License-Identifier: Apache-2.0
"""A mode in which torch computes a number alike, wherever in a tensor and however large the tensor.

Torch's kernels compute what is left over from whole vectors, tiles or blocks by other code, which rounds otherwise. A token's result
would depend on its place in a step, on the size of its chunk and on the context. Within `EqualRows` nothing is left over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


# A matrix product of float32 sums the rows left over from whole tiles in another order than others: tiles have 4 rows where several
# threads share a few, 6 with AVX2 on Intel's CPUs. The same holds of columns, and of terms beyond some number.
_ROWS, _COLUMNS, _TERMS = 12, 16, 128
# Of fewer outputs, a few rows are summed in several orders with AVX512 on Intel's CPUs, and more where threads share them.
_FEWEST_OUTPUTS = 4
# Attention takes so many keys at a time, and what is left over as a product does.
_KEYS = 512
# Elementwise operators take pairs of vectors; threads share out what is longer than a grain.
_VECTORS, _GRAIN = 64, 1 << 15


# Elementwise operators that round once, if at all: the code for vectors and that for single numbers agree.
_ONCE = """
    abs add equal bitwise_and bitwise_not bitwise_or ceil clamp clamp_max clamp_min div eq floor ge gt isfinite isinf isnan le logical_and
    logical_not logical_or lt masked_fill maximum minimum mul ne neg reciprocal relu round sign sqrt sub trunc where
"""
# Functions that move numbers, make them or ask for them. One that is missing here costs time: its operators are looked at.
_MOVING = """
    __contains__ __get__ __getitem__ __len__ __setitem__ _set_grad_enabled all any amax amin arange argmax argmin bool cat chunk clone
    contiguous copy_ detach diff dim dropout embedding expand expand_as fill_ flatten flip float full gather index_copy_ index_put_
    index_select int is_contiguous is_floating_point long masked_fill_ movedim narrow new_empty new_full new_ones new_zeros nonzero
    numel ones ones_like pad permute promote_types repeat repeat_interleave reshape scatter scatter_ select size split squeeze stack
    stride t to tolist topk transpose tril triu type type_as unbind unflatten unique unsqueeze view view_as zero_ zeros zeros_like
"""
_ROUNDED_ONCE, _MOVES = frozenset(_ONCE.split()), frozenset(_MOVING.split())


class EqualRows(TorchFunctionMode):
    """A mode that pads what torch's functions get, so that each number is computed alike."""

    def __init__(self) -> None:
        super().__init__()
        self._operators = _Operators()

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        stands_in = next((each for each in types if not issubclass(each, Tensor)), None)
        if stands_in is not None:  # what it stands for is computed by functions of torch, which are to be padded, too
            with self:
                return stands_in.__torch_function__(func, types, args, kwargs)
        if func is nn.functional.linear:
            return _pad_linear(*args, **kwargs)
        if _is_plain(func) and "alpha" not in kwargs:
            return func(*args, **kwargs)
        with self._operators:
            attends = func is nn.functional.scaled_dot_product_attention
            return _pad_attention(*args, **kwargs) if attends else func(*args, **kwargs)


class _Operators(TorchDispatchMode):
    """The same for the operators that a function consists of."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and torch would import its compiler at the first step

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        rule = _rule_of(func, "alpha" in kwargs)
        return func(*args, **kwargs) if rule is None else rule(func, *args, **kwargs)


@cache
def _is_plain(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name in _MOVES or name.strip("_") in _ROUNDED_ONCE


@cache
def _rule_of(func: Any, scaled: bool) -> Callable[..., Any] | None:
    """Return the rule by which an operator is computed; one that is `scaled` may round once or twice. None where torch's own serves."""
    name = func.overloadpacket.__name__
    if torch.Tag.pointwise in func.tags and (scaled or name.removesuffix("_") not in _ROUNDED_ONCE):
        return _pad_elementwise
    return _RULES.get(name)


def _pad(x: Tensor, more: Sequence[int], value: float = 0.0) -> Tensor:
    """Pad as torch, which copies also where nothing is missing."""
    return nn.functional.pad(x, tuple(more), value=value) if any(more) else x


def _pad_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    flat, outputs = input.reshape(-1, input.shape[-1]), weight.shape[0]
    padded = _pad(flat, (0, 0, 0, -len(flat) % _ROWS))
    if outputs < _FEWEST_OUTPUTS:
        weight = _pad(weight, (0, 0, 0, _FEWEST_OUTPUTS - outputs))
        bias = None if bias is None else _pad(bias, (0, _FEWEST_OUTPUTS - outputs))
    output = nn.functional.linear(padded, weight, bias)[: len(flat), :outputs]
    return output.reshape(*input.shape[:-1], outputs)


def _pad_attention(
    query: Tensor, keys: Tensor, values: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    """Attend. Torch takes up to 191 queries 32 at a time, which leaves some over, and then 64 or more, which does not."""
    rows, columns = query.shape[-2], keys.shape[-2]
    padded = -(-rows // _ROWS) * _ROWS if rows <= 2 * _ROWS else max(192, -(-rows // 64) * 64)
    more = (0, 0, 0, padded - rows)
    query = _pad(query, more)
    if attn_mask is not None:
        unseen = -columns % (_COLUMNS if columns <= _TERMS else _KEYS)
        keys, values = (_pad(each, (0, 0, 0, unseen)) for each in (keys, values))
        hidden = 0.0 if attn_mask.dtype == torch.bool else -torch.inf
        attn_mask = _pad(attn_mask.expand(*attn_mask.shape[:-1], columns), (0, unseen), hidden)
        if attn_mask.shape[-2] == rows:  # else it is one for all queries
            attn_mask = _pad(attn_mask, more)
    output = nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask, *args, **kwargs)
    return output[..., :rows, :].contiguous()


def _pad_product(func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Multiply `[..., rows, terms]` by `[..., terms, columns]`; what the product is added to comes first."""
    *added, x, y = args
    rows, columns = x.shape[-2], y.shape[-1]
    more = (0, -columns % _COLUMNS, 0, -rows % _ROWS)
    added = [_pad(each.expand(*x.shape[:-2], rows, columns), more) for each in added]
    output = func(*added, _pad(x, (0, 0, *more[2:])), _pad(y, more[:2]), **kwargs)
    return output[..., :rows, :columns].contiguous()


def _pad_batches(func: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Multiply batches, which may have as many terms as a context has columns."""
    more = -x.shape[-1] % _COLUMNS
    x, y = _pad(x, (0, more)), _pad(y, (0, 0, 0, more))
    if x.shape[-1] <= _TERMS:
        return _pad_product(func, x, y)
    wide = torch.promote_types(x.dtype, torch.float32)
    total = x.new_zeros((), dtype=wide)
    for terms, others in zip(x.split(_TERMS, -1), y.split(_TERMS, -2), strict=True):
        total = total + _pad_product(func, terms.to(wide), others.to(wide))
    return total.to(x.dtype)


def _pad_elementwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor) and each.dim()]
    shape = torch.broadcast_shapes(*(each.shape for each in tensors))
    count = shape.numel()
    if not count or not any(each.is_floating_point() for each in tensors):
        return func(*args, **kwargs)
    threads = min(torch.get_num_threads(), -(-count // _GRAIN))
    missing = -count % (_VECTORS * threads)

    def in_a_row(each: Any) -> Any:
        if not isinstance(each, Tensor) or not each.dim():
            return each
        return _pad(each.expand(shape).reshape(-1), (0, missing))

    result = func(*pytree.tree_map(in_a_row, args), **pytree.tree_map(in_a_row, kwargs))
    result = pytree.tree_map(lambda each: each[:count].view(shape), result)
    return args[0].copy_(result) if func._schema.is_mutable else result


def _pad_gated(func: Any, x: Tensor, dim: int = -1) -> Tensor:
    values, gates = x.chunk(2, dim)
    return values * _pad_elementwise(torch.ops.aten.sigmoid.default, gates)


def _sum_and_batches(func: Any, added: Tensor, x: Tensor, y: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return added * beta + _pad_batches(torch.bmm, x, y) * alpha


def _order_reduction(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Reduce rows of adjacent numbers: else vectors hold several rows."""
    names = [argument.name for argument in func._schema.arguments]
    dims = dict(zip(names[1:], args, strict=False)).get("dim", kwargs.get("dim"))
    dims = [dims] if isinstance(dims, int) else dims
    if not dims or not x.dim() or not x.is_floating_point():
        return func(x, *args, **kwargs)
    inner = [each % x.dim() for each in dims]
    last = range(-len(inner), 0)
    return func(x.movedim(inner, [*last]).contiguous().movedim([*last], inner), *args, **kwargs)


def _order_softmax(func: Any, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Take the softmax of adjacent numbers: else vectors hold several rows."""
    return func(x.movedim(dim, -1).contiguous(), -1, half_to_float).movedim(-1, dim)


_RULES: dict[str, Callable[..., Any]] = {
    "mm": _pad_product,
    "addmm": _pad_product,
    "bmm": _pad_batches,
    "baddbmm": _sum_and_batches,
    "mv": lambda func, x, vector: _pad_product(torch.mm, x, vector[:, None])[:, 0],
    "glu": _pad_gated,
    "log_sigmoid_forward": _pad_elementwise,
    "_softmax": _order_softmax,
    "_log_softmax": _order_softmax,
    **dict.fromkeys(
        ("sum", "mean", "prod", "std", "var", "var_mean", "linalg_vector_norm", "logsumexp"), _order_reduction
    ),
}
