# SPDX-License-Identifier: Apache-2.0
"""Codes of fp8 that a checkpoint brings, on targets whose fp8 is another type, or none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from optimum_neuron.checkpoints.quantize.rounding import round_fp8, round_int8
from optimum_neuron.step.features.codes.modules import QuantizedLinear
from optimum_neuron.targets.neuron.operators.codes import check_weight_types


def model(largest: float) -> nn.Module:
    weight = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    layers = {"first": QuantizedLinear(round_int8(weight)), "second": QuantizedLinear(round_fp8(weight, largest))}
    return nn.ModuleDict(layers)


@pytest.mark.parametrize("target", ["hlo", "trn2", "trn3"])
def test_codes_that_a_target_has_pass(target: str) -> None:
    check_weight_types(model(240.0), target)


def test_codes_that_trn2_reads_as_infinity_are_refused() -> None:
    check_weight_types(model(448.0), "trn3")
    told = "second has codes of fp8 up to 448, and the largest of target='trn2' is 240; use target='trn3', or pass --dequantize"
    with pytest.raises(ValueError, match=told):
        check_weight_types(model(448.0), "trn2")


def test_codes_that_are_no_numbers_are_refused() -> None:
    broken = model(240.0)
    broken["second"].codes.view(torch.uint8)[3, 2] = 0x7F  # type: ignore[index]
    with pytest.raises(ValueError, match="codes of fp8 up to nan"):
        check_weight_types(broken, "trn2")


@pytest.mark.parametrize("target", ["inf2", "trn1"])
def test_targets_without_fp8_refuse_it(target: str) -> None:
    with pytest.raises(ValueError, match=f"second has weights of fp8, a type that target='{target}' lacks"):
        check_weight_types(model(240.0), target)
