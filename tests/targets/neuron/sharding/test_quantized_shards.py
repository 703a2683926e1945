# SPDX-License-Identifier: Apache-2.0
"""Ranks hold codes with their scales, whole groups of them; a model whose groups would be parted is refused."""

from __future__ import annotations

import pytest
import torch
from quantized import quantize_mixed, values_of
from tiny import TINY_SIZES
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from optimum_neuron.artifact.weights import named_tensors
from optimum_neuron.checkpoints.quantize.quantize import quantize
from optimum_neuron.config import NeuronConfig
from optimum_neuron.step.features.codes.modules import QuantizedLinear
from optimum_neuron.step.interface import ATTENTION_NAME
from optimum_neuron.targets.neuron.sharding import shard_plan


def model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(**TINY_SIZES)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=ATTENTION_NAME)


def test_parts_stand_for_the_parts_of_the_weight() -> None:
    """Of all forms."""
    whole = model()
    quantize_mixed(whole, None)
    plan, tensors = shard_plan(whole, 2), named_tensors(whole)
    for name, module in whole.named_modules():
        if not isinstance(module, QuantizedLinear):
            continue
        parts = []
        for rank in range(2):
            own = {
                part: plan.shard(tensors[f"model.{name}.{part}"], f"model.{name}.{part}", rank)
                if f"model.{name}.{part}" in tensors
                else None
                for part in ("codes", "scale", "shift")
            }
            parts.append(values_of(module.kind, **own))
        of_inputs = name.endswith(("o_proj", "down_proj"))
        assert torch.equal(torch.cat(parts, int(of_inputs)), module.quantized_weight.dequantize()), name


def test_heads_that_share_a_group_stay_together() -> None:
    """Two heads of 16 inputs are a group of 32."""
    config = NeuronConfig.from_dict({"quantization": "int4", "quantization_exclude": ["*.down_proj"]})
    whole = model()
    quantize(whole, config)
    plan = shard_plan(whole, 2)
    name = "model.model.layers.0.self_attn.o_proj"
    assert (plan.local_shape(f"{name}.codes"), plan.local_shape(f"{name}.scale")) == ((64, 16), (64, 1))


def test_groups_that_would_be_parted_are_refused() -> None:
    whole = model()
    quantize(whole, NeuronConfig.from_dict({"quantization": "int4"}))
    told = "down_proj.weight is quantized in groups of 32 inputs, and a rank's 48 are no whole groups; use tensor_parallel_size=1"
    with pytest.raises(ValueError, match=told):
        shard_plan(whole, 2)
