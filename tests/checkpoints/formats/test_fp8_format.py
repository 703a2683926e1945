# SPDX-License-Identifier: Apache-2.0
"""FP8 weights and MXFP4 experts stand for what transformers and DeepSeek's own code dequantize them to, also over an edge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_files import LAYER, WEIGHT, check_read, check_refused, opened, scales, whole
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from optimum_neuron.checkpoints.formats.stored import NotKeptError


FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
SCALE = f"{WEIGHT}_scale_inv"


def codes(*shape: int) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(5)) * 30).to(torch.float8_e4m3fn)


def as_transformers(weight: Tensor, scale: Tensor) -> Tensor:
    dequantized: Tensor = Fp8Dequantize(None)._dequantize_one(weight, scale, output_dtype=torch.float32)
    return dequantized


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_dequantized_as_by_transformers(dtype: torch.dtype, tmp_path: Path) -> None:
    weight, scale = codes(96, 64), scales(3, 2, dtype=dtype)
    found = check_read(tmp_path, {WEIGHT: weight, SCALE: scale}, FP8, as_transformers(weight, scale))
    read = found.read_codes(WEIGHT)
    assert found.layers == (WEIGHT,) and found.plain == ("model.norm.weight",) and not found.notices
    assert read.kind == "fp8" and read.group_size == 32 and read.scale.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_scales_may_be_exponents(dtype: torch.dtype, tmp_path: Path) -> None:
    weight, scale = codes(64, 64), torch.tensor([[120, 127], [0, 140]], dtype=torch.uint8).view(dtype)
    settings = FP8 | {"scale_fmt": "ue8m0"}
    check_read(tmp_path, {WEIGHT: weight, f"{LAYER}.scale": scale}, settings, as_transformers(weight, scale))


@pytest.mark.parametrize("shape", [(80, 64), (64, 48), (72, 80), (8, 16)])
def test_blocks_that_reach_over_an_edge_have_their_scale(shape: tuple[int, int], tmp_path: Path) -> None:
    weight = codes(*shape)
    scale = scales(-(-shape[0] // 32), -(-shape[1] // 32), dtype=torch.float32)
    rows, columns = (torch.arange(size) // 32 for size in shape)
    check_read(tmp_path, {WEIGHT: weight, SCALE: scale}, FP8, weight.float() * scale[rows][:, columns])


def test_inputs_in_odd_parts_are_only_dequantized_and_quantized_inputs_left_out_with_a_notice(tmp_path: Path) -> None:
    weight, scale = codes(32, 40), scales(1, 2, dtype=torch.float32)
    expected = torch.cat((weight[:, :32].float() * scale[0, 0], weight[:, 32:].float() * scale[0, 1]), 1)
    found = check_read(tmp_path, {WEIGHT: weight, SCALE: scale}, FP8, expected, kept=False)
    with pytest.raises(NotKeptError, match="parts of 8 inputs"):
        found.read_codes(WEIGHT)
    tensors = {WEIGHT: codes(32, 32), SCALE: scales(1, 1), f"{LAYER}.input_scale": torch.ones(())}
    found = opened(tmp_path, tensors, FP8 | {"activation_scheme": "static"})
    assert found.plain == ("model.norm.weight",)
    assert found.notices == ("tiny also asks for quantized inputs of its layers; they stay as they are",)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (96,), (96, 1)])
@pytest.mark.parametrize("name", [SCALE, f"{WEIGHT}_scale"])
def test_one_scale_for_all_or_for_each_output(shape: tuple[int, ...], name: str, tmp_path: Path) -> None:
    weight, scale = codes(96, 64), scales(*shape, dtype=torch.float32)
    # A table may have one scale where layers have blocks.
    for settings in (FP8 | {"weight_block_size": None}, *([FP8] if shape == (1,) else [])):
        found = check_read(tmp_path, {WEIGHT: weight, name: scale}, settings, weight.float() * scale.reshape(-1, 1))
        assert found.read_codes(WEIGHT).group_size == 64


@pytest.mark.parametrize(("block", "grid"), [([32, 32], (2, 3)), (None, (2, 1)), (None, (1, 1))])
def test_experts_are_read_together(block: list[int] | None, grid: tuple[int, int], tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    weight, scale = codes(3, 64, 96), scales(3, *grid, dtype=torch.float32)
    found = opened(tmp_path, {name: weight, f"{name}_scale_inv": scale}, FP8 | {"weight_block_size": block})
    assert found.layers == (name,)
    assert torch.equal(found.read_codes(name).dequantize(), as_transformers(weight, scale))


NAN = torch.full((32, 32), float("nan")).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("tensors", "settings", "told"),
    [
        ({SCALE: None}, {}, "in FP8 and no .*weight_scale_inv"),
        ({f"{WEIGHT}_scale": scales(1, 1)}, {}, "weight_scale_inv and .*weight_scale"),
        ({WEIGHT: None}, {}, "no FP8 weight that it belongs to"),
        ({WEIGHT: NAN}, {}, "q_proj.weight holds NaN"),
        ({WEIGHT: torch.zeros(32, 32, dtype=torch.float8_e5m2), SCALE: None}, {}, "F8_E5M2"),
        ({WEIGHT: torch.zeros(32, 32, dtype=torch.int8), SCALE: None}, {}, "as I8 without"),
        ({SCALE: torch.full((1, 1), float("nan"))}, {}, "a scale of nan"),
        ({SCALE: torch.full((1, 1), 1e37)}, {}, "a scale of"),
        ({SCALE: torch.full((1, 1), 255, dtype=torch.uint8)}, {}, "scale_inv holds NaN"),
        ({SCALE: scales(2, 1)}, {}, r"the shape \[2, 1\], and a weight \[32, 32\] by \[32, 32\] has scales \[1, 1\]"),
        ({SCALE: scales(2, 16)}, {"weight_block_size": None}, r"the shape \[2, 16\], which fits no \[32, 32\]"),
        ({SCALE: scales(2, 1)}, {"weight_block_size": None}, r"the shape \[2, 1\], which fits no"),
        ({}, {"weight_block_size": [0, 32]}, r"weight_block_size=\[0, 32\]"),
        ({}, {"weight_block_size": 32}, "weight_block_size=32"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told(
    tensors: dict[str, Tensor | None], settings: dict[str, Any], told: str, tmp_path: Path
) -> None:
    check_refused(tmp_path, {WEIGHT: codes(32, 32), SCALE: scales(1, 1)} | tensors, FP8 | settings, told)


MXFP4 = {"quant_method": "mxfp4"}
EXPERTS = "model.layers.0.mlp.experts.down_proj"
BLOCKS, EXPONENTS = f"{EXPERTS}_blocks", f"{EXPERTS}_scales"


def mxfp4_tensors() -> dict[str, Tensor]:
    return {BLOCKS: whole(0, 255, 2, 24, 3, 16).byte(), EXPONENTS: whole(100, 150, 2, 24, 3, seed=3).byte()}


def test_mxfp4_experts_are_dequantized_as_by_transformers(tmp_path: Path) -> None:
    made = mxfp4_tensors()
    found = opened(tmp_path, made | {f"{EXPERTS}_bias": torch.ones(2, 24)}, MXFP4)
    weight = found.read_codes(EXPERTS)
    expected = convert_moe_packed_tensors(made[BLOCKS], made[EXPONENTS], dtype=torch.float32).transpose(1, 2)
    assert found.layers == (EXPERTS,) and found.plain == (f"{EXPERTS}_bias", "model.norm.weight")
    assert weight.kind == "fp4" and weight.group_size == 32 and weight.codes.shape == (2, 24, 48)
    assert torch.equal(weight.dequantize(), expected) and torch.equal(found.dequantize(EXPERTS), expected)


def test_the_smallest_and_the_largest_exponents(tmp_path: Path) -> None:
    """bfloat16 and float32 hold 2 ** -127 as one of their numbers without a leading one."""
    made = mxfp4_tensors()
    for exponent in (0, 1, 252):
        made[EXPONENTS] = torch.full_like(made[EXPONENTS], exponent)
        values = opened(tmp_path, made, MXFP4).read_codes(EXPERTS).dequantize()
        code = int(made[BLOCKS][0, 0, 0, 0]) & 7
        magnitude = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)[code]
        assert abs(values[0, 0, 0].item()) == magnitude * 2.0 ** (exponent - 127)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({EXPONENTS: None}, "down_proj has blocks and lacks scales"),
        ({BLOCKS: None}, "down_proj has scales and lacks blocks"),
        ({EXPONENTS: torch.full((2, 24, 3), 255, dtype=torch.uint8)}, "down_proj_scales holds NaN"),
        ({EXPONENTS: torch.full((2, 24, 3), 254, dtype=torch.uint8)}, "no finite values"),
        ({EXPONENTS: torch.zeros(2, 24, 2, dtype=torch.uint8)}, r"down_proj_scales has the shape \[2, 24, 2\]"),
        ({BLOCKS: torch.zeros(2, 24, 3, 8, dtype=torch.uint8)}, "blocks of 16 bytes"),
        ({BLOCKS: torch.zeros(2, 24, 3, 16, dtype=torch.int8)}, "down_proj_blocks is torch.int8"),
        ({EXPERTS: torch.ones(2, 96, 24)}, "plain and quantized"),
        ({BLOCKS: None, EXPONENTS: None}, "holds no quantized weights"),
    ],
)
def test_what_does_not_fit_mxfp4_is_told(changes: dict[str, Tensor | None], told: str, tmp_path: Path) -> None:
    check_refused(tmp_path, mxfp4_tensors() | changes, MXFP4, told, weight=EXPERTS)
