# SPDX-License-Identifier: Apache-2.0
"""Operators that are written otherwise than torch or torch-xla would, before a graph is lowered.

By the operator and its shapes, not by the model: whatever calls it gets the form that the Neuron compiler takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.export import ExportedProgram

from .weight_uses import LINEAR


# Of a top-k without a sort: so many rounds, each a few passes over the scores. Routers choose fewer.
LARGEST_K = 16
# The two largest finite numbers of float32. Beyond what scores may be: NaN above them, and what is chosen below them.
_BEYOND, _LARGEST = (2 - 2.0**-23) * 2.0**127, (2 - 2.0**-22) * 2.0**127


def decompose(program: ExportedProgram) -> ExportedProgram:
    """The program in operators that torch-xla lowers, and linear layers."""
    table = torch.export.default_decompositions()
    table.pop(LINEAR)  # whose weights are told apart from other matrices
    table[torch.ops.aten.mean.dim] = _mean
    table[torch.ops.aten.mean.default] = _mean
    table[torch.ops.aten.topk.default] = top_k
    table[torch.ops.aten.index_put.default] = put_where
    table[torch.ops.aten.cumsum.default] = running_sum
    table[torch.ops.aten.clamp.default] = bounded
    table[torch.ops.aten.gelu.default] = gelu
    table[torch.ops.aten.copy.default] = written_over
    table[torch.ops.aten.slice_scatter.default] = put_every
    return program.run_decompositions(table)


def _mean(
    x: Tensor, dim: list[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """torch-xla's own guards against dividing by 0 with NaN, which the device reports as an error where it meets it."""
    dims = dim or list(range(x.dim()))
    count = math.prod(x.shape[each] for each in dims)
    return torch.sum(x, dims, keepdim, dtype=dtype) * (1.0 / count)


def top_k(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    """`torch.topk` of up to LARGEST_K numbers in rounds: the largest that is left, the first index that has it, and so on.

    Falling values, on a tie the lowest index first; torch leaves open which of equal numbers it takes, and in what order. NaN is
    the largest, as in torch. Infinity is tied with the last two finite numbers of float32, so that no round meets it.

    Returns:
        Values and int64 indices, `k` along `dim`. NotImplemented where this form does not serve, for a lowering by a sort.
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
    """`torch.nn.functional.gelu` in float32, rounded once, as torch computes it of 16-bit numbers: torch-xla would round its constants
    to them. NotImplemented of other numbers."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        return NotImplemented
    wide = x.float()
    if approximate == "tanh":
        inner = torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3))
    else:
        inner = torch.erf(wide * math.sqrt(0.5))
    return (0.5 * wide * (1 + inner)).to(x.dtype)


def running_sum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """`torch.cumsum` in as many sums as its length has binary digits: torch-xla would have a window move over it.

    Sums of whole numbers are torch's to the bit; others are added in another order.
    """
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
    """What `x.copy_(source)` leaves, where it is read again within the graph: torch-xla would write it into `x` itself, a parameter."""
    source = source.to(x.dtype)
    return source if source.shape == x.shape else source.expand(x.shape)


def put_every(
    x: Tensor, source: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    """`x[start:end:step] = source` along `dim` as a selection; torch-xla would pad between values, which stores with a stride.

    Returns:
        NotImplemented where `step` is 1.
    """
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
    """`x[mask] = values` as a selection, where all places of a mask get the same; torch-xla would look for the places one by one.

    Returns:
        NotImplemented for other indices than one mask, and where each place gets a value of its own.
    """
    mask = indices[0]
    if accumulate or len(indices) != 1 or mask is None or mask.dtype != torch.bool:
        return NotImplemented
    kept = x.dim() - mask.dim()
    if values.dim() == kept + 1 and values.shape[0] == 1:
        values = values.squeeze(0)
    if values.dim() > kept:
        return NotImplemented
    return torch.where(mask.view(*mask.shape, *[1] * kept), values, x)


def bounded(x: Tensor, min: int | None = None, max: int | None = None) -> Tensor:
    """`torch.clamp` of int64 from one side; torch-xla would take the last int64 as the other bound, which no device has.

    Returns:
        NotImplemented for all else.
    """
    if x.dtype != torch.int64 or (min is not None and max is not None):
        return NotImplemented
    if min is not None:
        return torch.where(x < min, min, x)
    return x if max is None else torch.where(x > max, max, x)
