# SPDX-License-Identifier: Apache-2.0
"""Plain weights rounded to codes of few bits, from the weights alone, or with the importance of their inputs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from ...step.features.codes.weight import INT4_MIDDLE, UNUSED_SCALE_BITS, QuantizedWeight, pack_int4


FP8_LARGEST = 448.0  # e4m3 as the Open Compute Project has it
# Where the largest number is another one: the bits above stand for infinity and NaN there. nki-library's qkv_cte has the same limits.
FP8_LARGEST_ON = dict.fromkeys(("inf2", "trn1", "trn2"), 240.0)
_INT8_LARGEST, _INT4_CODES = 127, 15
# Parts of the scale that just holds a group's largest value: a smaller one clips that, and rounds the others finer.
_SHRUNK = tuple(1 - step / 40 for step in range(9))
# Elements that are searched at a time: as many as stay in a core's caches.
_PIECE = 1 << 17


def round_int8(weight: Tensor) -> QuantizedWeight:
    """Round `[..., outputs, inputs]` with a float32 scale for each output, symmetric."""
    return _round_outputs(weight, "int8", torch.int8, _INT8_LARGEST)


def round_fp8(weight: Tensor, largest: float = FP8_LARGEST) -> QuantizedWeight:
    """Round `[..., outputs, inputs]` with a float32 scale for each output; `largest` is the largest value of a code."""
    return _round_outputs(weight, "fp8", torch.float8_e4m3fn, largest)


def _round_outputs(weight: Tensor, kind: str, dtype: torch.dtype, largest: float) -> QuantizedWeight:
    codes, scale = torch.empty(weight.shape, dtype=dtype), torch.empty((*weight.shape[:-1], 1))

    def round_piece(start: int, rows: Tensor, own_codes: Tensor, own_scale: Tensor) -> None:
        own_scale.copy_(rows.abs().amax(-1, keepdim=True) / largest)
        values = rows / _divisor(own_scale)
        own_codes.copy_((values if dtype.is_floating_point else values.round_()).clamp_(-largest, largest))

    _share_pieces(round_piece, weight, codes, scale)
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

    def round_piece(start: int, rows: Tensor, own_codes: Tensor, own_scale: Tensor, *own_shift: Tensor) -> None:
        # A group is a column: so torch computes with whole vectors of groups, and adds up each in one order on every CPU.
        values = rows.t().contiguous()
        count = None if importance is None else _factors(importance, groups.shape, start, len(rows)).t().contiguous()
        zeros: Tensor | None = None
        if zero_point:
            scales, zeros = _shifted_scales(values)
        else:
            scales = _symmetric_scales(rows)
        found, zero = _best_scale(values, scales, zeros, count)
        # Rounded first: codes are chosen for the scale as it is stored.
        own_scale[:, 0].copy_(found if zero_point else _shorten_scale(values, found, count))
        stored = own_scale[:, 0].float()
        own_codes.copy_(_whole_numbers(values, _divisor(stored), zero).add_(zero).to(torch.uint8).t())
        for each in own_shift:
            each[:, 0].copy_(-zero * stored)

    _share_pieces(round_piece, groups, codes, scale, *(() if shift is None else (shift,)))
    if not scale.isfinite().all():
        raise ValueError(f"a weight of {float(weight.abs().amax()):.3g} is too large for int4 with scales in float16")
    packed = pack_int4(codes.flatten(-2))
    return QuantizedWeight("int4", packed, scale.squeeze(-1), None if shift is None else shift.squeeze(-1))


# In what follows, values are `[inputs of a group, groups]`. A group has several scales to choose from, `[scales, groups]`, and for each
# the code that stands for 0; without shifts that is the middle one.
_MIDDLE = float(INT4_MIDDLE)


def _symmetric_scales(groups: Tensor) -> Tensor:
    """Return scales by which the largest value of each of `[groups, inputs]` becomes -8, which has no positive counterpart, or +-7."""
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))[:, 0]
    return extreme * torch.tensor([part / code for code in (-_MIDDLE, _MIDDLE - 1) for part in _SHRUNK])[:, None]


def _shifted_scales(values: Tensor) -> tuple[Tensor, Tensor]:
    least, largest = values.amin(0).clamp_(max=0), values.amax(0).clamp_(min=0)
    scales = (largest - least) * torch.tensor([part / _INT4_CODES for part in _SHRUNK])[:, None]
    zeros = torch.where(scales > 0, -least * torch.tensor(_SHRUNK)[:, None] / scales, 0)
    return scales, zeros.round_().clamp_(0, _INT4_CODES)


def _factors(importance: Tensor, shape: torch.Size, start: int, count: int) -> Tensor:
    """Return `[count, inputs of a group]`: the factors of errors in groups from `start` on, of all `[..., outputs, groups, inputs]`."""
    rows, (outputs, groups) = importance.float().reshape(-1, shape[-1]), shape[-3:-1]
    number = torch.arange(start, start + count)
    weight = number // (outputs * groups) if len(rows) > groups else 0
    return rows[weight * groups + number % groups]


def _shorten_scale(values: Tensor, scale: Tensor, count: Tensor | None) -> Tensor:
    """Return the one of the two neighbouring float16 of few bits that has the lesser error."""
    bits = torch.stack([scale.half().view(torch.int16)] * 2)
    bits[1] += UNUSED_SCALE_BITS
    near = (bits & ~UNUSED_SCALE_BITS).view(torch.float16).float()
    return near.gather(0, _least_error(values, near, None, count))[0]


def _best_scale(
    values: Tensor, scales: Tensor, zeros: Tensor | None, count: Tensor | None
) -> tuple[Tensor, Tensor | float]:
    """Choose the scale of the least squared error; return the one that is best for its codes, and the code of 0, for each group."""
    best = _least_error(values, scales, zeros, count)
    zero = _MIDDLE if zeros is None else zeros.gather(0, best)[0]
    numbers = _whole_numbers(values, _divisor(scales.gather(0, best)[0]), zero)
    weighted = numbers if count is None else numbers * count
    squares = (weighted * numbers).sum(0)
    return torch.where(squares > 0, (weighted * values).sum(0) / squares, 0), zero


def _least_error(values: Tensor, scales: Tensor, zeros: Tensor | None, count: Tensor | None) -> Tensor:
    """Return `[1, groups]`: which scale has the least squared error, weighted by `count`."""
    errors, numbers, divisors = torch.empty_like(scales), torch.empty_like(values), _divisor(scales)
    for place, error in enumerate(errors):
        zero = _MIDDLE if zeros is None else zeros[place]
        _whole_numbers(values, divisors[place], zero, out=numbers).mul_(scales[place]).sub_(values).square_()
        torch.sum(numbers if count is None else numbers.mul_(count), 0, out=error)
    return errors.min(0, keepdim=True).indices


def _whole_numbers(values: Tensor, divisor: Tensor, zero: Tensor | float, out: Tensor | None = None) -> Tensor:
    """Return codes before they are scaled: whole numbers from -zero on."""
    bounds: Any = -zero, _INT4_CODES - zero  # torch's annotations take two tensors or two numbers, not either
    return torch.div(values, divisor, out=out).round_().clamp_(*bounds)


def _divisor(scale: Tensor) -> Tensor:
    """Return a scale to divide by: codes are zero where all values of a group are, or are too small for a scale."""
    return scale.masked_fill(scale == 0, torch.inf)


def _share_pieces(work: Callable[..., None], weight: Tensor, *outputs: Tensor) -> None:
    """Call `work` for parts of the rows of the last dimension, from all threads of torch.

    It gets the first row's number, the rows in float32, and the same rows of tensors that are to be filled.
    """
    rows = weight.reshape(-1, weight.shape[-1])
    flat = [each.view(-1, each.shape[-1]) for each in outputs]
    count = max(1, _PIECE // weight.shape[-1])

    def do_part(start: int) -> None:
        part = slice(start, start + count)
        work(start, rows[part].float(), *(each[part] for each in flat))

    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            deque(pool.map(do_part, range(0, len(rows), count)), maxlen=0)
    finally:
        torch.set_num_threads(threads)
