# SPDX-License-Identifier: Apache-2.0
"""A GGUF file's blocks are kept under the names, and in the row order, in which transformers has the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import write_gguf
from tiny import TINY_SIZES
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

from optimum_neuron.checkpoints.formats.stored import NotKeptError
from optimum_neuron.checkpoints.gguf.config import read_config
from optimum_neuron.checkpoints.gguf.header import read_header
from optimum_neuron.checkpoints.gguf.weights import GgufFile


def empty(config: Any) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_1", "F16"])
def test_a_llamas_weights_are_those_that_transformers_has(kind: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    exact = write_gguf(tiny_checkpoint, tmp_path / "tiny.gguf", kind)
    found = GgufFile(read_header(tmp_path / "tiny.gguf"), empty(AutoConfig.from_pretrained(tiny_checkpoint)))
    matrices = {name for name, tensor in exact.items() if tensor.ndim == 2}
    assert set(found.layers) == (set() if kind == "F16" else matrices)
    assert set(found.layers) | set(found.plain) == exact.keys()
    for name in found.layers:
        assert torch.equal(found.read_codes(name).dequantize(), exact[name]), name
        assert torch.equal(found.dequantize(name), exact[name]), name
    for name in found.plain:
        assert torch.equal(found.read_plain(name), exact[name]), name


@pytest.mark.full
def test_a_real_files_weights_are_those_that_gguf_makes_of_them(smollm2_gguf: Path) -> None:
    header = read_header(smollm2_gguf)
    found = GgufFile(header, empty(read_config(header, "smollm2")[0]))
    assert len(found.layers) == 211 and len(found.plain) == 61
    layer = "model.layers.3"
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj"):
        weight = found.read_codes(f"{layer}.{name}.weight")
        assert weight.group_size == 32
        assert torch.equal(weight.dequantize(), found.dequantize(f"{layer}.{name}.weight")), name


def write_experts(path: Path, kinds: dict[str, str], architecture: str = "qwen3moe") -> dict[str, Tensor]:
    """A file with the experts of a layer of a Qwen3-MoE alone; returns what each tensor stands for."""
    writer = gguf.GGUFWriter(path, architecture)
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
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def experts_model() -> PreTrainedModel:
    return empty(
        Qwen3MoeConfig(
            **TINY_SIZES | {"num_hidden_layers": 1}, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
        )
    )


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_experts_gates_and_projections_up_are_joined(kind: str, tmp_path: Path) -> None:
    values = write_experts(tmp_path / "x.gguf", dict.fromkeys(("ffn_up_exps", "ffn_gate_exps", "ffn_down_exps"), kind))
    found = GgufFile(read_header(tmp_path / "x.gguf"), experts_model())
    experts = "model.layers.0.mlp.experts"
    joined = torch.cat((values["ffn_gate_exps"], values["ffn_up_exps"]), 1)
    assert set(found.layers) == {f"{experts}.gate_up_proj", f"{experts}.down_proj"}
    assert torch.equal(found.read_codes(f"{experts}.gate_up_proj").dequantize(), joined)
    assert torch.equal(found.dequantize(f"{experts}.gate_up_proj"), joined)
    assert torch.equal(found.read_codes(f"{experts}.down_proj").dequantize(), values["ffn_down_exps"])


def test_experts_of_different_kinds_are_only_dequantized(tmp_path: Path) -> None:
    values = write_experts(tmp_path / "x.gguf", {"ffn_gate_exps": "Q8_0", "ffn_up_exps": "Q4_1"})
    found = GgufFile(read_header(tmp_path / "x.gguf"), experts_model())
    name = "model.layers.0.mlp.experts.gate_up_proj"
    with pytest.raises(
        NotKeptError, match=r"gate_up_proj is made of tensors with the types Q8_0, Q4_1; pass --dequantize"
    ):
        found.read_codes(name)
    assert torch.equal(found.dequantize(name), torch.cat((values["ffn_gate_exps"], values["ffn_up_exps"]), 1))


def test_kinds_with_tables_are_only_dequantized(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    write_gguf(tiny_checkpoint, path, "Q4_0")
    content = bytearray(path.read_bytes())
    at = content.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4 + 2 * 8
    content[at : at + 4] = int(gguf.GGMLQuantizationType.IQ4_NL).to_bytes(4, "little")
    path.write_bytes(content)
    found = GgufFile(read_header(path), empty(AutoConfig.from_pretrained(tiny_checkpoint)))
    with pytest.raises(NotKeptError, match=r"q_proj\.weight has the type IQ4_NL"):
        found.read_codes("model.layers.0.self_attn.q_proj.weight")
    assert found.dequantize("model.layers.0.self_attn.q_proj.weight").shape == (64, 64)


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
