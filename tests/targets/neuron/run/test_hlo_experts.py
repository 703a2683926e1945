# SPDX-License-Identifier: Apache-2.0
"""Models with experts as HLO: the static formulation, run by XLA on this CPU, gives transformers' tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import export_tiny, random_tokens
from moe import CONFIGS, make_checkpoint
from transformers import AutoModelForCausalLM

from optimum_neuron import NeuronModelForCausalLM


# A few routers' tokens are compared with the eager target's in test_hlo_target.py and test_hlo_expert_forms.py.
@pytest.mark.full
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(name, tmp_path / "checkpoint")
    model = NeuronModelForCausalLM.from_pretrained(export_tiny(checkpoint, tmp_path / "artifact", target="hlo"))
    own = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, experts_implementation="eager").eval()
    model.generation_config.eos_token_id = own.generation_config.eos_token_id = None
    prompts = [random_tokens(length, seed=length) for length in (5, 21, 29, 13)]
    outputs = model.generate_batch([prompt.tolist() for prompt in prompts], max_new_tokens=6)
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        text = own.generate(torch.from_numpy(prompt)[None].long(), max_new_tokens=6, do_sample=False)
        assert output.generated_tokens == text[0, len(prompt) :].tolist()
    assert {graph.split("_")[0] for graph in model.runner.graph_calls} == {"mixed", "chunked", "token"}
