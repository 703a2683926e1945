# SPDX-License-Identifier: Apache-2.0
"""Blocks of every kind that is kept stand for what gguf's own function makes of them, to the bit, under transformers' names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import close_writer, write_gguf
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from tiny import TINY_SIZES
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

from optimum_neuron.checkpoints.formats.stored import NotKeptError
from optimum_neuron.checkpoints.gguf.blocks import KINDS, repack
from optimum_neuron.checkpoints.gguf.header import read_header
from optimum_neuron.checkpoints.gguf.weights import GgufFile


# Where in a block a float16 begins: any bytes there are a number if two bits of its exponent are zero.
HALVES = {
    "Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "MXFP4": [], "Q2_K": [80, 82], "Q3_K": [108],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
}  # fmt: skip
CODES = {"Q4_0": "int4", "Q4_1": "int4", "Q2_K": "int4", "Q3_K": "int4", "Q4_K": "int4", "MXFP4": "fp4"}


def some_blocks(kind: str, seed: int) -> np.ndarray:
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


def test_exponents_that_stand_for_no_number_and_bytes_that_are_no_blocks_are_refused() -> None:
    data = some_blocks("MXFP4", 0)
    data[0, 0] = 255
    with pytest.raises(ValueError, match="x has a scale of nan"):
        repack("x", "MXFP4", torch.from_numpy(data))
    with pytest.raises(ValueError, match="x has outputs of 35 bytes, and blocks of Q8_0 have 34"):
        repack("x", "Q8_0", torch.zeros(2, 35, dtype=torch.uint8))


def empty(config: Any) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def write_experts(path: Path, kinds: dict[str, str]) -> dict[str, Tensor]:
    """A file with the experts of a layer of a Qwen3-MoE alone; returns what each tensor stands for."""
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_block_count(1)
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    values = {}
    for seed, (name, kind) in enumerate(kinds.items()):
        shape = (4, 64, 32) if "down" in name else (4, 32, 64)
        plain = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
        chosen = gguf.GGMLQuantizationType[kind]
        data = gguf.quants.quantize(plain, chosen)
        values[name] = torch.from_numpy(np.array(gguf.quants.dequantize(data, chosen))).reshape(shape)
        writer.add_tensor(f"blk.0.{name}.weight", data, raw_dtype=chosen)
    close_writer(writer)
    return values


@pytest.mark.parametrize("up", ["Q8_0", "Q4_1"])
def test_gates_and_projections_up_are_joined_and_their_codes_kept_if_of_one_kind(up: str, tmp_path: Path) -> None:
    kinds = {"ffn_up_exps": up, "ffn_gate_exps": "Q4_1", "ffn_down_exps": "Q4_1"}
    values = write_experts(tmp_path / "x.gguf", kinds)
    sizes = TINY_SIZES | {"num_hidden_layers": 1}
    config = Qwen3MoeConfig(**sizes, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    found = GgufFile(read_header(tmp_path / "x.gguf"), empty(config))
    experts = "model.layers.0.mlp.experts"
    joined = torch.cat((values["ffn_gate_exps"], values["ffn_up_exps"]), 1)
    assert set(found.layers) == {f"{experts}.gate_up_proj", f"{experts}.down_proj"}
    assert torch.equal(found.dequantize(f"{experts}.gate_up_proj"), joined)
    assert torch.equal(found.read_codes(f"{experts}.down_proj").dequantize(), values["ffn_down_exps"])
    if up == "Q4_1":
        assert torch.equal(found.read_codes(f"{experts}.gate_up_proj").dequantize(), joined)
        return
    with pytest.raises(NotKeptError, match=r"gate_up_proj is made of tensors of types Q4_1, Q8_0; pass --deq"):
        found.read_codes(f"{experts}.gate_up_proj")


def test_a_scale_that_is_no_number_is_told_by_its_tensor(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    write_gguf(tiny_checkpoint, path, "Q8_0")
    reader = gguf.GGUFReader(path, "r+")
    (tensor,) = (tensor for tensor in reader.tensors if tensor.name == "blk.1.ffn_up.weight")
    tensor.data[0, :2] = (0, 0x7C)
    reader.data.flush()
    found = GgufFile(read_header(path), empty(AutoConfig.from_pretrained(tiny_checkpoint)))
    with pytest.raises(ValueError, match=r"x\.gguf: blk\.1\.ffn_up\.weight has a scale of inf"):
        found.read_codes("model.layers.1.mlp.up_proj.weight")
