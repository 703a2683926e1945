# SPDX-License-Identifier: Apache-2.0
"""GPTQ and AWQ layers stand for (code - zero point) * scale to the bit, in all formats, whatever the order of groups or outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_files import LAYER, WEIGHT, check_read, check_refused, opened, scales, whole, words
from torch import Tensor

from optimum_neuron.checkpoints.formats.stored import NotKeptError


INPUTS, OUTPUTS = 64, 24
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}


def layer(
    bits: int = 4, group: Tensor | None = None, *, groups: int = 2, form: str = "gptq", zero: Tensor | None = None,
    dtype: torch.dtype = torch.float16,
) -> tuple[dict[str, Tensor], Tensor]:  # fmt: skip
    codes = whole(0, 2**bits - 1, INPUTS, OUTPUTS)
    zero = whole(1, 2**bits - 1, groups, OUTPUTS, seed=2) if zero is None else zero
    scale = scales(groups, OUTPUTS, dtype=dtype)
    order = torch.arange(INPUTS) // (INPUTS // groups) if group is None else group
    value = (codes - zero[order]).float() * scale.float()[order]
    stored = zero - 1 if form == "gptq" else zero
    tensors = {"qweight": words(codes.T, bits).T, "qzeros": words(stored, bits), "scales": scale}
    if group is not None:
        tensors["g_idx"] = group.int()
    return {f"{LAYER}.{part}": tensor for part, tensor in tensors.items()}, value.T


@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
@pytest.mark.parametrize(("bits", "groups"), [(4, 2), (4, 1), (8, 4)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_codes_less_zero_points_times_scales(
    bits: int, groups: int, form: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    tensors, value = layer(bits, groups=groups, form=form, dtype=dtype)
    settings = GPTQ | {"bits": bits, "group_size": INPUTS // groups, "checkpoint_format": form}
    found = check_read(tmp_path, tensors, settings, value)
    assert found.layers == (WEIGHT,) and found.plain == ("model.norm.weight",)
    weight = found.read_codes(WEIGHT)
    assert weight.kind == f"int{bits}" and weight.group_size == INPUTS // groups and weight.shift is not None
    assert torch.equal(found.read_plain("model.norm.weight"), torch.ones(4))


def test_a_zero_point_of_zero_borrows_from_the_next_of_its_word(tmp_path: Path) -> None:
    """The first format stores words less 0x11111111."""
    zero = whole(0, 15, 2, OUTPUTS, seed=2)
    zero[0, 0] = 0
    tensors, value = layer(zero=zero)
    plain = words(zero, 4).long() - 0x11111111
    tensors[f"{LAYER}.qzeros"] = ((plain + 2**31) % 2**32 - 2**31).int()
    check_read(tmp_path, tensors, GPTQ, value)


def test_groups_in_another_order_are_kept_and_single_inputs_out_of_order_only_dequantized(tmp_path: Path) -> None:
    settings = GPTQ | {"desc_act": True}
    tensors, value = layer(group=torch.tensor([1, 0]).repeat_interleave(32))
    assert check_read(tmp_path, tensors, settings, value).read_codes(WEIGHT).group_size == 32
    tensors, value = layer(group=torch.randperm(INPUTS, generator=torch.Generator().manual_seed(0)) // 32)
    found = check_read(tmp_path, tensors, settings, value, kept=False)
    with pytest.raises(NotKeptError, match=r"q_proj\.weight has inputs of one group .* --dequantize"):
        found.read_codes(WEIGHT)


def test_scales_of_float32_with_zero_points_are_kept_where_they_are_short(tmp_path: Path) -> None:
    tensors, value = layer(dtype=torch.float32)
    found = check_read(tmp_path, tensors, GPTQ, value, kept=False)
    with pytest.raises(NotKeptError, match="zero points and scales of float32"):
        found.read_codes(WEIGHT)
    rounded = tensors[f"{LAYER}.scales"].half().float()
    assert opened(tmp_path, tensors | {f"{LAYER}.scales": rounded}, GPTQ).read_codes(WEIGHT).kind == "int4"


def test_symmetric_layers_need_no_shift_and_settings_of_single_layers_are_followed(tmp_path: Path) -> None:
    for bits in (4, 8):
        tensors, value = layer(bits, zero=torch.full((1, OUTPUTS), 2 ** (bits - 1)), groups=1)
        found = check_read(tmp_path, tensors, GPTQ | {"bits": bits, "group_size": -1}, value)
        assert found.read_codes(WEIGHT).shift is None
    tensors, value = layer(8, groups=1)
    changes = {r"-:.*mlp.*": {}, r"+:.*q_proj": {"bits": 8, "group_size": -1}}
    check_read(tmp_path, tensors, GPTQ | {"dynamic": changes}, value)
    with pytest.raises(ValueError, match=r"leaves it out by '-:.\*q_proj'"):
        opened(tmp_path, tensors, GPTQ | {"dynamic": {r"-:.*q_proj": {}}})


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"bits": 3}, "3 bits"), ({"bits": "4"}, "bits='4'"), ({"bits": True}, "bits=True"),
        ({"group_size": 0}, "group_size=0"),
        ({"group_size": 10**12}, "group_size=1000000000000"),
        ({"group_size": 16}, r"q_proj.scales has the shape \[2, 24\], and is to have \[4, 24\]"),
        ({"checkpoint_format": "marlin"}, "the format marlin"),
        ({"dynamic": ["q_proj"]}, "no object"), ({"dynamic": {"+:.*q_proj": [8]}}, "no object"),
        ({"dynamic": {"+:((": {}}}, r"the pattern '\(\('"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_told(settings: dict[str, Any], told: str, tmp_path: Path) -> None:
    check_refused(tmp_path, layer()[0], GPTQ | settings, told)


@pytest.mark.parametrize(
    ("part", "tensor", "told"),
    [
        ("scales", None, "has qweight, qzeros and lacks scales"),
        ("qweight", None, "has qzeros, scales and lacks qweight"),
        ("scales", torch.full((2, OUTPUTS), float("nan")).half(), "a scale of nan"),
        ("scales", torch.full((2, OUTPUTS), float("inf")).half(), "a scale of inf"),
        ("scales", torch.full((2, OUTPUTS), 3e38), "a scale of 3.0"),
        ("scales", torch.ones(2, OUTPUTS, dtype=torch.float64), r"q_proj.scales is torch.float64"),
        ("qzeros", torch.zeros(2, 2, dtype=torch.int32), r"q_proj.qzeros has the shape \[2, 2\]"),
        ("qweight", torch.zeros(8, OUTPUTS, dtype=torch.int64), r"q_proj.qweight is torch.int64"),
        ("qweight", torch.zeros(8 * OUTPUTS, dtype=torch.int32), "is to have 2 dimensions"),
        ("qweight", torch.zeros(0, OUTPUTS, dtype=torch.int32), r"the shape \[0, 24\]"),
        ("g_idx", torch.full((INPUTS,), 2, dtype=torch.int32), "names groups 2 to 2, and there are scales of 0 to 1"),
        ("g_idx", torch.full((INPUTS,), -1, dtype=torch.int32), "names groups -1 to -1"),
        ("weight", torch.ones(OUTPUTS, INPUTS), "plain and quantized"),
    ],
)  # fmt: skip
def test_a_damaged_layer_is_told_by_its_tensor(part: str, tensor: Tensor | None, told: str, tmp_path: Path) -> None:
    check_refused(tmp_path, layer()[0] | {f"{LAYER}.{part}": tensor}, GPTQ, told)


AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}
# The n-th 4 bits of a word are those of this output of its eight.
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def awq_layer(groups: int) -> tuple[dict[str, Tensor], Tensor]:
    codes, zero, scale = whole(0, 15, 48, 24), whole(0, 15, groups, 24, seed=2), scales(groups, 24)
    order = torch.arange(48) // (48 // groups)
    value = (codes - zero[order]).float() * scale.float()[order]
    places = [8 * word + output for word in range(3) for output in ORDER]
    tensors = {"qweight": words(codes[:, places], 4), "qzeros": words(zero[:, places], 4), "scales": scale}
    return {f"{LAYER}.{part}": tensor for part, tensor in tensors.items()}, value.T


@pytest.mark.parametrize(("groups", "size"), [(3, 16), (1, -1)])
def test_an_awq_layer_is_codes_less_zero_points_times_scales(groups: int, size: int, tmp_path: Path) -> None:
    tensors, value = awq_layer(groups)
    assert check_read(tmp_path, tensors, AWQ | {"group_size": size}, value).read_codes(WEIGHT).kind == "int4"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"version": "gemv"}, "version gemv"), ({"bits": 8}, "of 8 bits"), ({"zero_point": False}, "zero_point=False"),
        ({"group_size": 32}, "48 inputs, no groups of 32"), ({"group_size": 24}, r"scales has the shape \[3, 24\]"),
        ({}, "lacks scales"),
    ],
)  # fmt: skip
def test_awq_settings_that_do_not_fit_and_lacking_scales_are_told(
    settings: dict[str, Any], told: str, tmp_path: Path
) -> None:
    lacking = {} if settings else {f"{LAYER}.scales": None}
    check_refused(tmp_path, awq_layer(3)[0] | lacking, AWQ | settings, told)
