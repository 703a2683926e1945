# SPDX-License-Identifier: Apache-2.0
"""Quantized weights stand for what their codes, scales and shifts say, and do not take what does not fit together."""

import pytest
import torch
from torch.profiler import profile

from optimum_neuron.step.features.codes.weight import CODE_DTYPES, FP4_VALUES, PACKED, QuantizedWeight, pack_int4


def _codes(kind: str, outputs: int, inputs: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    if kind in PACKED:
        return torch.randint(0, 256, (outputs, inputs // 2), generator=generator, dtype=torch.uint8)
    if kind == "int8":
        return torch.randint(-128, 128, (outputs, inputs), generator=generator, dtype=torch.int8)
    return torch.randn(outputs, inputs, generator=generator).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("kind", CODE_DTYPES)
@pytest.mark.parametrize("groups", [1, 4])
def test_a_weight_is_its_codes_times_their_groups_scale(kind: str, groups: int) -> None:
    scale = torch.rand(6, groups, generator=torch.Generator().manual_seed(1)).half()
    weight = QuantizedWeight(kind, _codes(kind, 6, 64), scale)
    values, dequantized = weight.values(), weight.dequantize()
    assert (weight.outputs, weight.inputs, weight.group_size) == (6, 64, 64 // groups)
    for output in range(6):
        for column in (0, 1, 15, 16, 63):
            factor = float(scale[output, column // (64 // groups)])
            assert dequantized[output, column].item() == torch.tensor(values[output, column].item() * factor).item()


def test_the_first_code_of_a_byte_is_its_low_half() -> None:
    codes = torch.tensor([[1, 15, 0, 8]])
    assert pack_int4(codes).tolist() == [[0xF1, 0x80]]
    ones = torch.ones(1, 1)
    assert QuantizedWeight("int4", pack_int4(codes), ones).values().tolist() == [[-7.0, 7.0, -8.0, 0.0]]
    assert QuantizedWeight("int4", pack_int4(codes), ones, ones).dequantize().tolist() == [[2.0, 16.0, 1.0, 9.0]]
    assert QuantizedWeight("fp4", pack_int4(codes), ones).values().tolist() == [[0.5, -6.0, 0.0, 0.0]]
    assert sorted(set(FP4_VALUES)) == [-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6]


@pytest.mark.parametrize(
    ("kind", "scale", "shift", "told"),
    [
        ("int8", torch.ones(6, 3), None, r"scales \[6, 3\] do not fit codes \[6, 64\]"),
        ("int8", torch.ones(5, 1), None, r"scales \[5, 1\] do not fit"),
        ("int8", torch.ones(6), None, r"scales \[6\] do not fit"),
        ("int8", torch.ones(6, 1, dtype=torch.float64), None, "scales torch.float64"),
        ("int4", torch.ones(6, 2), torch.ones(6, 1), r"a shift \[6, 1\]"),
        ("int4", torch.ones(6, 2), torch.ones(6, 2).half(), "of torch.float16"),
        ("fp8", torch.ones(6, 2), torch.ones(6, 2), "does not fit fp8"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    kind: str, scale: torch.Tensor, shift: torch.Tensor | None, told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        QuantizedWeight(kind, _codes(kind, 6, 64), scale, shift)


@pytest.mark.parametrize(("kind", "has_shift"), [("int8", False), ("int4", False), ("int4", True), ("fp8", False)])
def test_one_copy_of_a_weight_is_made_of_its_codes(kind: str, has_shift: bool) -> None:
    scale = torch.ones(256, 8)
    weight = QuantizedWeight(kind, _codes(kind, 256, 512), scale, scale if has_shift else None)
    with profile(profile_memory=True) as taken:
        found = weight.dequantize()
    floats = sum(max(0, each.self_cpu_memory_usage) for each in taken.events())
    unpacked = found.numel() * (3 if kind == "int4" else 0)  # bytes: both halves, and the codes in order
    assert found.nbytes <= floats < 1.1 * found.nbytes + unpacked
