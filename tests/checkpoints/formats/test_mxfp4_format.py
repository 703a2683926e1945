# SPDX-License-Identifier: Apache-2.0
"""MXFP4 experts stand for what transformers dequantizes them to, with outputs before inputs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from quantized_files import opened, whole
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors


NAME = "model.layers.0.mlp.experts.down_proj"
BLOCKS, SCALES = f"{NAME}_blocks", f"{NAME}_scales"


def tensors() -> dict[str, Tensor]:
    return {BLOCKS: whole(0, 255, 2, 24, 3, 16).byte(), SCALES: whole(100, 150, 2, 24, 3, seed=3).byte()}


def test_experts_are_dequantized_as_by_transformers(tmp_path: Path) -> None:
    made = tensors()
    found = opened(tmp_path, made | {f"{NAME}_bias": torch.ones(2, 24)}, {"quant_method": "mxfp4"})
    weight = found.read_codes(NAME)
    expected = convert_moe_packed_tensors(made[BLOCKS], made[SCALES], dtype=torch.float32).transpose(1, 2)
    assert found.layers == (NAME,) and found.plain == (f"{NAME}_bias", "model.norm.weight")
    assert weight.kind == "fp4" and weight.group_size == 32 and weight.codes.shape == (2, 24, 48)
    assert torch.equal(weight.dequantize(), expected) and torch.equal(found.dequantize(NAME), expected)


def test_the_smallest_and_the_largest_exponents(tmp_path: Path) -> None:
    """bfloat16 and float32 hold 2 ** -127 as one of their numbers without a leading one."""
    made = tensors()
    for exponent in (0, 1, 252):
        made[SCALES] = torch.full_like(made[SCALES], exponent)
        values = opened(tmp_path, made, {"quant_method": "mxfp4"}).read_codes(NAME).dequantize()
        code = int(made[BLOCKS][0, 0, 0, 0]) & 7
        magnitude = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)[code]
        assert abs(values[0, 0, 0].item()) == magnitude * 2.0 ** (exponent - 127)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({SCALES: None}, "down_proj has blocks and lacks scales"),
        ({BLOCKS: None}, "down_proj has scales and lacks blocks"),
        ({SCALES: torch.full((2, 24, 3), 255, dtype=torch.uint8)}, "down_proj_scales holds NaN"),
        ({SCALES: torch.full((2, 24, 3), 254, dtype=torch.uint8)}, "no finite numbers"),
        ({SCALES: torch.zeros(2, 24, 2, dtype=torch.uint8)}, r"down_proj_scales has the shape \[2, 24, 2\]"),
        ({BLOCKS: torch.zeros(2, 24, 3, 8, dtype=torch.uint8)}, "blocks of 16 bytes"),
        ({BLOCKS: torch.zeros(2, 24, 3, 16, dtype=torch.int8)}, "down_proj_blocks is torch.int8"),
        ({NAME: torch.ones(2, 96, 24)}, "plain and quantized"),
        ({BLOCKS: None, SCALES: None}, "holds no quantized weights"),
    ],
)
def test_what_does_not_fit_is_told(changes: dict[str, Tensor | None], told: str, tmp_path: Path) -> None:
    changed = {name: tensor for name, tensor in (tensors() | changes).items() if tensor is not None}
    with pytest.raises(ValueError, match=told):
        opened(tmp_path, changed, {"quant_method": "mxfp4"}).read_codes(NAME)
