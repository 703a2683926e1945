# SPDX-License-Identifier: Apache-2.0
"""Blocks of every kind that is kept stand for what gguf's own function makes of them, to the bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st

from optimum_neuron.checkpoints.gguf.blocks import KINDS, repack


# Where in a block a float16 begins: any bytes there are a number if two bits of its exponent are zero.
HALVES = {
    "Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "MXFP4": [], "Q2_K": [80, 82], "Q3_K": [108],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
}  # fmt: skip
CODES = {"Q4_0": "int4", "Q4_1": "int4", "Q2_K": "int4", "Q3_K": "int4", "Q4_K": "int4", "MXFP4": "fp4"}


def some_blocks(kind: str, seed: int) -> np.ndarray:
    """Random blocks of finite numbers: `[3, bytes of two blocks]`."""
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    blocks = np.random.default_rng(seed).integers(0, 256, (3, 2, size), dtype=np.uint8)
    for start in HALVES[kind]:
        blocks[..., start + 1] &= 0xBB
    if kind == "MXFP4":
        blocks[..., 0] %= 250
    return blocks.reshape(3, -1)


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 2**32 - 1))
@examples(40)
def test_blocks_are_dequantized_as_by_gguf(kind: str, seed: int) -> None:
    data = some_blocks(kind, seed)
    weight = repack("x", kind, torch.from_numpy(data))
    expected = torch.from_numpy(gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind]))
    assert weight.kind == CODES.get(kind, "int8")
    assert torch.equal(weight.dequantize(), expected)


def test_experts_are_read_together() -> None:
    data = np.stack([some_blocks("Q4_K", seed) for seed in range(2)])
    weight = repack("x", "Q4_K", torch.from_numpy(data))
    expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType.Q4_K)
    assert torch.equal(weight.dequantize(), torch.from_numpy(expected)) and weight.codes.shape == (2, 3, 256)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if HALVES[kind]])
@pytest.mark.parametrize("half", [0x7C00, 0x7E00])
def test_scales_that_are_no_numbers_are_refused(kind: str, half: int) -> None:
    data = some_blocks(kind, 0)
    for start in HALVES[kind][-1:]:
        data[1, start : start + 2] = (half & 0xFF, half >> 8)
    with pytest.raises(ValueError, match=r"tensor x has a scale of (inf|nan)"):
        repack("tensor x", kind, torch.from_numpy(data))


def test_exponents_that_stand_for_no_number_are_refused() -> None:
    data = some_blocks("MXFP4", 0)
    data[0, 0] = 255
    with pytest.raises(ValueError, match="x has a scale of nan"):
        repack("x", "MXFP4", torch.from_numpy(data))


def test_bytes_that_are_no_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="x has outputs of 35 bytes, and blocks of Q8_0 have 34"):
        repack("x", "Q8_0", torch.zeros(2, 35, dtype=torch.uint8))
