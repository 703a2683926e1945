# SPDX-License-Identifier: Apache-2.0
"""Rounded weights are as near as their codes allow, whatever their values are, and one output or group does not change another's."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from optimum_neuron.checkpoints.quantize.rounding import round_fp8, round_int4, round_int8
from optimum_neuron.step.features.codes.weight import UNUSED_SCALE_BITS, QuantizedWeight


_Round = Callable[[Tensor], QuantizedWeight]
ROUNDINGS: dict[str, _Round] = {
    "int8": round_int8,
    "fp8": round_fp8,
    "fp8 of Trainium 2": lambda weight: round_fp8(weight, 240.0),
    "int4": lambda weight: round_int4(weight, 32),
    "int4 with a zero point": lambda weight: round_int4(weight, 32, zero_point=True),
}


def _weight(seed: int, outputs: int = 5, inputs: int = 64) -> Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))


@given(seed=st.integers(0, 10**6), exponent=st.integers(-3, 3), outlier=st.floats(1, 20))
@settings(max_examples=30, deadline=None)
def test_values_are_off_by_half_a_step_at_most_or_clipped_where_that_is_better(
    seed: int, exponent: int, outlier: float
) -> None:
    weight = _weight(seed) * 10.0**exponent
    weight[0, 3] *= outlier
    groups = weight.view(5, 2, 32)
    error = (round_int8(weight).dequantize() - weight).abs()
    assert (error <= weight.abs().amax(-1, keepdim=True) / 127 * 0.5001).all()
    error = (round_fp8(weight).dequantize() - weight).abs()
    assert (error <= (weight.abs() / 15.9).maximum(weight.abs().amax(-1, keepdim=True) / 448 / 2**9)).all()
    # The nearest of 15 steps across a group's span, without any search; of scales of 5 significant bits none may be as good for a group.
    for zero_point in (False, True):
        error = (round_int4(weight, 32, zero_point=zero_point).dequantize() - weight).view(5, 2, 32).square().sum(-1)
        step = groups.abs().amax(-1, keepdim=True) / 7
        plain = ((groups / step).round() * step - groups).square().sum(-1)
        assert ((error <= plain * 1.3 + 1e-12).all() and error.sum() <= plain.sum() + 1e-12) or zero_point
        span = (groups.amax(-1).clamp(min=0) - groups.amin(-1).clamp(max=0)) / 15
        assert (error <= 32 * (span * 1.1) ** 2).all()


@pytest.mark.parametrize("factor", [1.0, 1e-4, 1e-6, 1e-9, 8e4])
def test_scales_of_int4_times_codes_are_numbers_of_bfloat16(factor: float) -> None:
    for importance in (None, torch.rand(64) + 0.1):
        weight = round_int4(_weight(0, 50) * factor, 32, importance=importance)
        assert torch.equal(weight.dequantize().bfloat16().float(), weight.dequantize())
        assert not (weight.scale.view(torch.int16) & UNUSED_SCALE_BITS).any()
        assert weight.scale.any() == (factor > 1e-8)


@pytest.mark.parametrize("name", ROUNDINGS)
def test_an_output_is_rounded_alike_beside_any_others(name: str) -> None:
    weight = torch.cat([_weight(0), _weight(1) * 100])
    whole, part = (ROUNDINGS[name](each) for each in (weight, weight[2:4]))
    assert torch.equal(whole.dequantize()[2:4], part.dequantize())
    experts = ROUNDINGS[name](torch.stack([weight[:5], weight[5:]]))
    assert torch.equal(experts.dequantize().flatten(0, 1), whole.dequantize())


@pytest.mark.parametrize("name", ROUNDINGS)
def test_zeros_and_single_values_are_kept(name: str) -> None:
    weight = torch.zeros(3, 64)
    weight[1, 7] = -2.5
    weight[2, :] = 0.125
    found = ROUNDINGS[name](weight).dequantize()
    assert torch.equal(found[0], weight[0])
    assert torch.count_nonzero(found[1]) == 1
    assert torch.allclose(found, weight, rtol=1e-3)


def test_codes_of_fp8_stay_below_what_a_device_has() -> None:
    weight = round_fp8(_weight(0), 240.0)
    assert weight.codes.float().abs().amax() == 240


def test_groups_that_do_not_divide_and_weights_beyond_float16_are_refused() -> None:
    with pytest.raises(ValueError, match="groups of 48 do not divide 64 inputs"):
        round_int4(_weight(0), 48)
    with pytest.raises(ValueError, match="too large for int4"):
        round_int4(_weight(0) * 1e7, 32)
