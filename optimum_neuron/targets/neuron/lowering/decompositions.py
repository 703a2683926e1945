# SPDX-License-Identifier: Apache-2.0
"""Operators that are written in another form than torch's or torch-xla's before a graph is lowered.

An operator and its shapes decide, not the model: every caller gets the form that the Neuron compiler takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.utils._pytree import tree_iter, tree_map_only

from .weight_uses import LINEAR


_ATEN = torch.ops.aten
# Of a top-k without a sort: so many rounds, each a few passes over the scores. Routers choose fewer.
LARGEST_K = 16
# The two largest finite numbers of float32. Beyond what scores may be: NaN above them, and what is chosen below them.
_BEYOND, _LARGEST = (2 - 2.0**-23) * 2.0**127, (2 - 2.0**-22) * 2.0**127


def decompose(program: ExportedProgram) -> ExportedProgram:
    """Return the program in operators that torch-xla lowers, and linear layers."""
    table = torch.export.default_decompositions()
    table.pop(LINEAR)  # keeps its weights apart from other matrices
    table.update({
        _ATEN.mean.dim: _mean_by_sum, _ATEN.mean.default: _mean_by_sum, _ATEN.topk.default: top_k,
        _ATEN.index_put.default: put_where, _ATEN.cumsum.default: running_sum, _ATEN.clamp.default: bound_from_one_side,
        _ATEN.gelu.default: gelu, _ATEN.copy.default: written_over, _ATEN.slice_scatter.default: put_every,
    })  # fmt: skip
    return program.run_decompositions(table)


def _mean_by_sum(
    x: Tensor, dim: list[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Take a mean without torch-xla's guard against dividing by 0: the device reports its NaN as an error."""
    dims = dim or list(range(x.dim()))
    count = math.prod(x.shape[each] for each in dims)
    return torch.sum(x, dims, keepdim, dtype=dtype) * (1.0 / count)


def top_k(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    """Take `torch.topk` of up to LARGEST_K numbers in rounds: the largest that is left, the first index that has it, and so on.

    Values fall, and a tie has the lowest index first; torch leaves both open. NaN is the largest, as in torch. Infinity is tied with the
    last two finite numbers of float32, so that no round meets it. Return NotImplemented where this form does not serve.
    """
    if not largest or not x.is_floating_point() or not x.dim() or not 1 <= k <= LARGEST_K:
        return NotImplemented
    scores = x.float()
    scores = torch.where(scores.isnan(), _BEYOND, scores.clamp(-_LARGEST, _LARGEST))
    count = x.shape[dim]
    shape = [1] * x.dim()
    shape[dim] = count
    order = torch.arange(count, dtype=torch.int32, device=x.device).view(shape)
    values, indices = [], []
    for _ in range(k):
        index = torch.where(scores >= scores.amax(dim, keepdim=True), order, count).amin(dim, keepdim=True)
        chosen = order == index
        values.append(torch.where(chosen, x, 0.0).sum(dim, keepdim=True, dtype=x.dtype))
        indices.append(index)
        scores = torch.where(chosen, -_BEYOND, scores)
    return torch.cat(values, dim), torch.cat(indices, dim).to(torch.int64)


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """Compute `torch.nn.functional.gelu` in float32 and round once, as torch does for 16-bit numbers; NotImplemented for others."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        return NotImplemented
    wide = x.float()
    if approximate == "tanh":
        inner = torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3))
    else:
        inner = torch.erf(wide * math.sqrt(0.5))
    return (0.5 * wide * (1 + inner)).to(x.dtype)


def running_sum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Take `torch.cumsum` in as many sums as its length has binary digits, where torch-xla would move a window: exact for whole numbers."""
    whole = not x.is_floating_point() and dtype is None
    total = x.to(torch.int64 if whole else dtype or x.dtype)
    if not x.dim():
        return total
    total, shift = total.movedim(dim, -1), 1
    while shift < total.shape[-1]:
        total = torch.cat([total[..., :shift], total[..., shift:] + total[..., :-shift]], dim=-1)
        shift *= 2
    return total.movedim(-1, dim)


def written_over(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Return what `x.copy_(source)` leaves, where torch-xla would write it into `x` itself, a parameter."""
    source = source.to(x.dtype)
    return source if source.shape == x.shape else source.expand(x.shape)


def put_every(
    x: Tensor, source: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    """Write `x[start:end:step] = source` along `dim` as a selection; torch-xla would store with a stride. NotImplemented for step 1."""
    if step == 1:
        return NotImplemented
    size = x.shape[dim]
    places = range(size)[slice(start, end, step)]
    wide, source = x.movedim(dim, -1), source.movedim(dim, -1)
    each = source[..., None].expand(*source.shape, step).flatten(-2)[..., : size - places.start]
    first, last = places.start, places.start + each.shape[-1]
    spread = torch.cat([wide[..., :first], each, wide[..., last:]], dim=-1)
    order = torch.arange(size, dtype=torch.int32, device=x.device)
    turn = torch.arange(step, dtype=torch.int32, device=x.device) == first % step
    taken = turn.expand(-(-size // step), step).flatten()[:size] & (order >= first) & (order < places.stop)
    return torch.where(taken, spread, wide).movedim(-1, dim)


def put_where(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    """Write `x[mask] = values` as a selection, where all places of a mask get the same; NotImplemented for all else."""
    mask = indices[0]
    if accumulate or len(indices) != 1 or mask is None or mask.dtype != torch.bool:
        return NotImplemented
    kept = x.dim() - mask.dim()
    if values.dim() == kept + 1 and values.shape[0] == 1:
        values = values.squeeze(0)
    if values.dim() > kept:
        return NotImplemented
    return torch.where(mask.view(*mask.shape, *[1] * kept), values, x)


def bound_from_one_side(x: Tensor, min: int | None = None, max: int | None = None) -> Tensor:
    """Take `torch.clamp` of int64 from one side, without torch-xla's 64-bit bound on the other; NotImplemented for all else."""
    if x.dtype != torch.int64 or (min is not None and max is not None):
        return NotImplemented
    if min is not None:
        return torch.where(x < min, min, x)
    return x if max is None else torch.where(x > max, max, x)


@dataclass(frozen=True)
class Pair:
    """A complex tensor: both parts have its shape, and the type of its parts."""

    real: Tensor
    imaginary: Tensor


def _multiply_pairs(left: Any, right: Any) -> Pair:
    if not isinstance(left, Pair):
        left, right = right, left
    if not isinstance(right, Pair):
        return Pair(left.real * right, left.imaginary * right)
    real = left.real * right.real - left.imaginary * right.imaginary
    return Pair(real, left.real * right.imaginary + left.imaginary * right.real)


_COMPUTED: dict[Any, Callable[..., Any]] = {
    _ATEN.polar.default: lambda size, angle: Pair(size * angle.cos(), size * angle.sin()),
    _ATEN.complex.default: Pair,
    _ATEN.view_as_complex.default: lambda x: Pair(x.select(-1, 0), x.select(-1, 1)),
    _ATEN.view_as_real.default: lambda x: torch.stack([x.real, x.imaginary], -1),
    _ATEN.mul.Tensor: _multiply_pairs,
}
# Change the shape or the place of numbers, and so of each part.
_MOVES = frozenset({
    _ATEN.alias.default, _ATEN.clone.default, _ATEN.expand.default, _ATEN.permute.default, _ATEN.select.int,
    _ATEN.slice.Tensor, _ATEN.squeeze.dims, _ATEN.unsqueeze.default, _ATEN.view.default,
})  # fmt: skip


def has_complex(node: torch.fx.Node) -> bool:
    return any(_is_complex(each) for each in (node, *node.all_input_nodes))


def can_compute(node: torch.fx.Node) -> bool:
    """Return whether `compute_pairs` knows an operator; it knows no stored complex numbers."""
    stored = any(each.op == "placeholder" and _is_complex(each) for each in node.all_input_nodes)
    return not stored and (node.target in _COMPUTED or node.target in _MOVES)


def compute_pairs(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what an operator makes of pairs, or the pair that it makes."""
    if target in _COMPUTED:
        return _COMPUTED[target](*args, **kwargs)

    parts = [tree_map_only(Pair, attrgetter(part), args) for part in ("real", "imaginary")]
    return Pair(*(target(*own, **kwargs) for own in parts))


def has_pairs(target: Any, args: tuple[Any, ...]) -> bool:
    """Return whether an operator is for `compute_pairs`: it makes a pair, or takes one."""
    makes = target in _COMPUTED and target is not _ATEN.mul.Tensor
    return makes or any(isinstance(each, Pair) for each in tree_iter(args))


def _is_complex(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_complex()
