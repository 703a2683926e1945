# SPDX-License-Identifier: Apache-2.0
"""What llama.cpp loads is the checkpoint: each weight's bits, queries and keys in the order in which it rotates them."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file
from tiny import TINY_SIZES
from transformers import LlamaConfig, LlamaForCausalLM

from benchmark.peers.checkpoints import write_gguf


def test_bfloat16_weights_keep_their_bits_and_names(tmp_path: Path) -> None:
    config = LlamaConfig(**TINY_SIZES, dtype="bfloat16")
    LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(write_gguf(tmp_path)).tensors}
    weights = load_file(tmp_path / "model.safetensors")
    assert len(weights) == len(found)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in weights.items():
        tensor = found[f"{names.get_name(name.removesuffix('.weight'))}.weight"]
        assert tuple(reversed(tensor.shape.tolist())) == tuple(weight.shape)
        if weight.dim() == 1:
            assert torch.equal(torch.tensor(tensor.data), weight.float())
        elif name.endswith("v_proj.weight") or "embed" in name:
            assert torch.equal(torch.tensor(tensor.data).view(torch.bfloat16), weight)
    # a head's rows 0, 8, 1, 9, ...: the pairs that are rotated together lie side by side
    query = torch.tensor(found["blk.0.attn_q.weight"].data).view(torch.bfloat16)
    rows = [half + pair for pair in range(8) for half in (0, 8)]
    assert torch.equal(query[16:32], weights["model.layers.0.self_attn.q_proj.weight"][16:32][rows])


def test_other_models_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}), encoding="utf-8")
    with pytest.raises(ValueError, match="model_type llama, not 'gpt2'; leave out the peer llamacpp"):
        write_gguf(tmp_path)
