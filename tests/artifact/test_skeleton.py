# SPDX-License-Identifier: Apache-2.0
"""A model without memory is the one that transformers would load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import TINY_CONFIGS
from transformers import AutoModelForCausalLM

from optimum_neuron.artifact.skeleton import empty_model


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_tensors_have_the_types_in_which_transformers_loads_them(dtype: str, tmp_path: Path) -> None:
    """A router's bias stays in float32."""
    AutoModelForCausalLM.from_config(TINY_CONFIGS["deepseek_v3"]()).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, dtype)).state_dict()
    empty = empty_model(tmp_path, dtype, trust_remote_code=False).state_dict()
    assert {name: each.dtype for name, each in empty.items()} == {name: each.dtype for name, each in loaded.items()}
    kept = {name.rpartition(".")[2] for name, each in loaded.items() if each.dtype != getattr(torch, dtype)}
    assert kept == (set() if dtype == "float32" else {"e_score_correction_bias"})
