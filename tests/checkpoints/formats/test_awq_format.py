# SPDX-License-Identifier: Apache-2.0
"""AWQ layers stand for (code - zero point) * scale to the bit, their outputs put back in order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_files import LAYER, WEIGHT, opened, scales, whole, words
from torch import Tensor


AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}
# The n-th 4 bits of a word are those of this output of its eight.
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def layer(groups: int) -> tuple[dict[str, Tensor], Tensor]:
    codes, zero, scale = whole(0, 15, 48, 24), whole(0, 15, groups, 24, seed=2), scales(groups, 24)
    order = torch.arange(48) // (48 // groups)
    value = (codes - zero[order]).float() * scale.float()[order]
    places = [8 * word + output for word in range(3) for output in ORDER]
    tensors = {"qweight": words(codes[:, places], 4), "qzeros": words(zero[:, places], 4), "scales": scale}
    return {f"{LAYER}.{part}": tensor for part, tensor in tensors.items()}, value.T


@pytest.mark.parametrize(("groups", "size"), [(3, 16), (1, -1)])
def test_a_layer_is_codes_less_zero_points_times_scales(groups: int, size: int, tmp_path: Path) -> None:
    tensors, value = layer(groups)
    found = opened(tmp_path, tensors, AWQ | {"group_size": size})
    weight = found.read_codes(WEIGHT)
    assert weight.kind == "int4" and torch.equal(weight.dequantize(), value)
    assert torch.equal(found.dequantize(WEIGHT), value)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"version": "gemv"}, "version gemv"),
        ({"bits": 8}, "of 8 bits"),
        ({"zero_point": False}, "zero_point=False"),
        ({"group_size": 32}, "48 inputs, which are no groups of 32"),
        ({"group_size": 24}, r"scales has the shape \[3, 24\]"),
    ],
)
def test_settings_that_do_not_fit_are_told(settings: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=told):
        opened(tmp_path, layer(3)[0], AWQ | settings).read_codes(WEIGHT)


def test_a_layer_without_scales_is_told(tmp_path: Path) -> None:
    tensors = layer(3)[0]
    del tensors[f"{LAYER}.scales"]
    with pytest.raises(ValueError, match="lacks scales"):
        opened(tmp_path, tensors, AWQ)
