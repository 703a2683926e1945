# SPDX-License-Identifier: Apache-2.0
"""Exports a tiny model for the CPU and generates with it where there is no C++ compiler, by an installed wheel's kernels of each
instruction set that this machine has. cibuildwheel and test_packaging.py run it; its exit status tells.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from optimum_neuron import NeuronConfig, NeuronModelForCausalLM, export_model
from optimum_neuron.artifact.user_cache import CACHE_VARIABLE
from optimum_neuron.kernels.host.instruction_sets import CPU_VARIABLE, list_instruction_sets
from optimum_neuron.targets.cpu.native_library import load_kernels


CONFIG = LlamaConfig(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=300,
    max_position_embeddings=64,
)  # fmt: skip
SIZES = NeuronConfig(batch_size=1, sequence_length=64, prefill_chunk_size=8, dtype="float32", target="cpu")


def check(folder: Path) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).eval()
    model.save_pretrained(folder / "checkpoint")
    asked = {"inputs": torch.arange(11)[None], "max_new_tokens": 8, "do_sample": False}
    expected = model.generate(**asked)
    export_model(folder / "checkpoint", folder / "artifact", config=SIZES)
    for each in list_instruction_sets():
        os.environ[CPU_VARIABLE] = each.name
        load_kernels.cache_clear()
        found = NeuronModelForCausalLM.from_pretrained(folder / "artifact").generate(**asked)
        if not torch.equal(found, expected):
            raise SystemExit(f"{each.name}: {found.tolist()} instead of {expected.tolist()}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        os.environ |= {"CXX": "no-such-compiler", CACHE_VARIABLE: str(Path(name, "cache"))}
        check(Path(name))
