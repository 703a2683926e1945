# SPDX-License-Identifier: Apache-2.0
"""Plain weights rounded to codes of few bits, from the weights alone, or with the importance of their inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ...step.features.codes.weight import INT4_MIDDLE, UNUSED_SCALE_BITS, QuantizedWeight, pack_int4


FP8_LARGEST = 448.0  # e4m3 as the Open Compute Project has it
# Where the largest number is another one: the bits above stand for infinity and NaN there.
FP8_LARGEST_ON = {"trn2": 240.0}
_INT8_LARGEST, _INT4_CODES = 127, 15
# Parts of the scale that just holds a group's largest value: a smaller one clips that, and rounds the others finer.
_SHRUNK = tuple(1 - step / 40 for step in range(9))
# Elements that are searched at a time: as many as stay in a core's caches.
_PIECE = 1 << 16


def round_int8(weight: Tensor) -> QuantizedWeight:
    """Round `[..., outputs, inputs]` with a float32 scale for each output, symmetric."""
    return _round_outputs(weight, "int8", torch.int8, _INT8_LARGEST)


def round_fp8(weight: Tensor, largest: float = FP8_LARGEST) -> QuantizedWeight:
    """Round `[..., outputs, inputs]` with a float32 scale for each output; `largest` is the largest value of a code."""
    return _round_outputs(weight, "fp8", torch.float8_e4m3fn, largest)


def _round_outputs(weight: Tensor, kind: str, dtype: torch.dtype, largest: float) -> QuantizedWeight:
    codes, scale = torch.empty(weight.shape, dtype=dtype), torch.empty((*weight.shape[:-1], 1))
    for rows, (own_codes, own_scale) in _cut_pieces(weight, codes, scale):
        own_scale.copy_(rows.abs().amax(-1, keepdim=True) / largest)
        values = _divide(rows, own_scale)
        own_codes.copy_((values if dtype.is_floating_point else values.round_()).clamp_(-largest, largest))
    return QuantizedWeight(kind, codes, scale)


def round_int4(
    weight: Tensor, group_size: int, *, zero_point: bool = False, importance: Tensor | None = None
) -> QuantizedWeight:
    """Round `[..., outputs, inputs]` in groups of inputs, each with the float16 scale of the least squared error among a few.

    Without zero points a scale has 5 significant bits, so that it times any code is a number of bfloat16. Raise ValueError where groups do not divide the
    inputs, or a scale is larger than float16 has.

    Args:
        zero_point: values of a group are spread between its least and its largest, and not around zero.
        importance: `[inputs]`, or for a weight `[experts, outputs, inputs]` `[experts, inputs]`: positive factors of the squared errors of an
            input's weights; such as the mean square of the input, by which they reach the output. Default: all alike.
    """
    inputs = weight.shape[-1]
    if inputs % group_size:
        raise ValueError(f"groups of {group_size} do not divide {inputs} inputs")
    groups = weight.unflatten(-1, (-1, group_size))
    codes = torch.empty(groups.shape, dtype=torch.uint8)
    scale = torch.empty((*groups.shape[:-1], 1), dtype=torch.float16)
    shift = torch.empty(scale.shape) if zero_point else None
    done = 0
    for values, own in _cut_pieces(groups, *((codes, scale) if shift is None else (codes, scale, shift))):
        count = None if importance is None else _factors(importance, groups.shape, done, len(values))
        done += len(values)
        found, zero = _best_scale(values, _shifted_scales(values) if zero_point else _symmetric_scales(values), count)
        # Rounded first: codes are chosen for the scale as it is stored.
        own[1].copy_(found if zero_point else _shorten_scale(values, found, zero, count))
        own[0].copy_((_whole_numbers(values, own[1].float(), zero)).add_(zero))
        if zero_point:
            own[2].copy_(-zero * own[1].float())
    if not scale.isfinite().all():
        raise ValueError(f"a weight of {float(weight.abs().amax()):.3g} is too large for int4 with scales in float16")
    packed = pack_int4(codes.flatten(-2))
    return QuantizedWeight("int4", packed, scale.squeeze(-1), None if shift is None else shift.squeeze(-1))


# A scale for each group, and the code that stands for 0.
_Candidate = tuple[Tensor, Tensor]


def _symmetric_scales(values: Tensor) -> Iterator[_Candidate]:
    """Yield candidates in which the largest value becomes -8, which has no positive counterpart, or +-7."""
    extreme = values.gather(-1, values.abs().argmax(-1, keepdim=True))
    middle = torch.full_like(extreme, INT4_MIDDLE)
    for code in (-INT4_MIDDLE, INT4_MIDDLE - 1):
        yield from ((extreme * (part / code), middle) for part in _SHRUNK)


def _shifted_scales(values: Tensor) -> Iterator[_Candidate]:
    least, largest = values.amin(-1, keepdim=True).clamp_(max=0), values.amax(-1, keepdim=True).clamp_(min=0)
    for part in _SHRUNK:
        scale = (largest - least) * (part / _INT4_CODES)
        zero = torch.where(scale > 0, -least * part / scale, 0).round_().clamp_(0, _INT4_CODES)
        yield scale, zero


def _factors(importance: Tensor, shape: torch.Size, start: int, count: int) -> Tensor:
    """Return `[count, inputs of a group]`: the factors of errors in groups from `start` on, of all `[..., outputs, groups, inputs]`."""
    rows, (outputs, groups) = importance.float().reshape(-1, shape[-1]), shape[-3:-1]
    number = torch.arange(start, start + count)
    weight = number // (outputs * groups) if len(rows) > groups else 0
    return rows[weight * groups + number % groups]


def _shorten_scale(values: Tensor, scale: Tensor, zero: Tensor, count: Tensor | None) -> Tensor:
    """Return the one of the two neighbouring float16 of few bits that has the lesser error."""
    bits = scale.half().view(torch.int16)
    down, up = (((bits + more) & ~UNUSED_SCALE_BITS).view(torch.float16).float() for more in (0, UNUSED_SCALE_BITS))
    return torch.where(_squared_error(values, up, zero, count) < _squared_error(values, down, zero, count), up, down)


def _best_scale(values: Tensor, candidates: Iterable[_Candidate], count: Tensor | None = None) -> _Candidate:
    """Return the candidate of the least squared error of each group, weighted by `count`, with the scale that is best for its codes."""
    scale, zero = (torch.zeros(len(values), 1) for _ in range(2))
    least = torch.full((len(values), 1), torch.inf)
    for candidate in candidates:
        error = _squared_error(values, *candidate, count)
        better = error < least
        least, scale, zero = (
            torch.where(better, *pair) for pair in ((error, least), (candidate[0], scale), (candidate[1], zero))
        )
    numbers = _whole_numbers(values, scale, zero)
    weighted = numbers if count is None else numbers * count
    squares = (weighted * numbers).sum(-1, keepdim=True)
    return torch.where(squares > 0, (weighted * values).sum(-1, keepdim=True) / squares, 0), zero


def _squared_error(values: Tensor, scale: Tensor, zero: Tensor, count: Tensor | None) -> Tensor:
    squares = _whole_numbers(values, scale, zero).mul_(scale).sub_(values).square_()
    return (squares if count is None else squares.mul_(count)).sum(-1, keepdim=True)


def _whole_numbers(values: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Return codes before they are scaled: whole numbers from -zero on."""
    numbers = _divide(values, scale).round_()
    return torch.minimum(torch.maximum(numbers, -zero, out=numbers), _INT4_CODES - zero, out=numbers)


def _divide(values: Tensor, scale: Tensor) -> Tensor:
    """Return quotients; zero where the scale is: all values of such a group are zero, or too small for it."""
    return (values / scale).nan_to_num_(0.0, 0.0, 0.0) if bool((scale == 0).any()) else values / scale


def _cut_pieces(weight: Tensor, *outputs: Tensor) -> Iterator[tuple[Tensor, tuple[Tensor, ...]]]:
    """Yield rows of the last dimension in float32, in parts, with the same rows of tensors that are to be filled."""
    rows = weight.reshape(-1, weight.shape[-1])
    flat = [each.view(-1, each.shape[-1]) for each in outputs]
    count = max(1, _PIECE // weight.shape[-1])
    for start in range(0, len(rows), count):
        piece = slice(start, start + count)
        yield rows[piece].float(), tuple(each[piece] for each in flat)
