# SPDX-License-Identifier: Apache-2.0
"""Estimates of models with quantized weights and caches: bytes are those of an export's files and states, products those of the plain model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_config
from tiny import TINY_CONFIGS, TINY_SIZES
from transformers import AutoModelForCausalLM, LlamaConfig

from optimum_neuron.artifact.quantization import write_formats
from optimum_neuron.artifact.weights import named_tensors
from optimum_neuron.checkpoints.quantize.quantize import formats_of, quantize
from optimum_neuron.config import NeuronConfig
from optimum_neuron.step.features.codes.formats import weight_formats
from optimum_neuron.step.interface import ATTENTION_NAME
from optimum_neuron.step.state_specs import StateSizes, byte_count, state_specs
from optimum_neuron.targets.neuron.sharding import shard_plan
from optimum_neuron.tools.estimate.core_sizes import core_sizes
from optimum_neuron.tools.estimate.estimate import estimate_model
from optimum_neuron.tools.estimate.model_sizes import measure_model
from optimum_neuron.tools.estimate.step_needs import cache_bytes


FORMS: dict[str, dict[str, Any]] = {
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4", "quantization_exclude": ("*.o_proj",)},
    "zero points": {"quantization": "int4", "quantization_zero_point": True, "quantization_group_size": 64},
    "fp8": {"quantization": "fp8"},
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_bytes_are_those_that_an_export_writes(form: str, tied: bool, tmp_path: Path) -> None:
    LlamaConfig(**TINY_SIZES, tie_word_embeddings=tied, dtype="bfloat16").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(tmp_path), dtype=torch.bfloat16)
    config = NeuronConfig.from_dict({"target": "trn2", **FORMS[form]})
    expected = formats_of(model, config)
    quantize(model, config)
    assert weight_formats(model) == expected
    distinct = {each.data_ptr(): each for each in named_tensors(model).values()}
    written = sum(each.nbytes for each in distinct.values())
    head = model.get_output_embeddings()
    both = tied and form != "fp8"  # codes that are read by rows and multiplied with lie in both ways
    written += both * head.codes.nbytes
    report = estimate_model(str(tmp_path), {"sequence_length": 64, **FORMS[form]}, ["trn2"], tensor_parallel_size=1)
    # Scales of a head that shares its table are counted once more.
    assert report.estimates[0].memory.weights == written + both * head.scale.nbytes
    plain = estimate_model(str(tmp_path), {"sequence_length": 64}, ["trn2"], tensor_parallel_size=1)
    assert report.sizes.parameters == plain.sizes.parameters
    assert core_sizes(report.sizes, 1).linear_params == core_sizes(plain.sizes, 1).linear_params


def test_cores_share_codes_as_ranks_do(tmp_path: Path) -> None:
    LlamaConfig(**TINY_SIZES, dtype="bfloat16").save_pretrained(tmp_path)
    options = {"sequence_length": 64, "quantization": "int8"}
    report = estimate_model(str(tmp_path), options, ["trn2"], tensor_parallel_size=4)
    model = AutoModelForCausalLM.from_config(
        LlamaConfig.from_pretrained(tmp_path), dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME
    )
    quantize(model, NeuronConfig.from_dict({"target": "trn2", "quantization": "int8"}))
    plan = shard_plan(model, 4)
    sizes = [torch.Size(plan.local_shape(name)).numel() * each.itemsize for name, each in named_tensors(model).items()]
    assert report.estimates[0].memory.weights == sum(sizes) + 4


def test_a_target_without_the_type_is_left_out_with_a_reason(tmp_path: Path) -> None:
    LlamaConfig(**TINY_SIZES, dtype="bfloat16").save_pretrained(tmp_path)
    options = {"sequence_length": 64, "quantization": "fp8"}
    report = estimate_model(str(tmp_path), options, ["inf2", "trn2"], tensor_parallel_size=1)
    assert [each.config.target for each in report.estimates] == ["trn2"]
    assert "inf2 has no fp8." in report.notes
    with pytest.raises(ValueError, match="quantization='fp8' needs a type that target='inf2' lacks"):
        estimate_model(str(tmp_path), options, ["inf2"], tensor_parallel_size=1)


def test_codes_of_a_checkpoint_are_not_known_from_its_config(tmp_path: Path) -> None:
    LlamaConfig(**TINY_SIZES, dtype="bfloat16").save_pretrained(tmp_path)
    options = {"sequence_length": 64, "quantization": "checkpoint"}
    with pytest.raises(ValueError, match="its config alone is read here; give the kind of codes"):
        estimate_model(str(tmp_path), options, ["trn2"], tensor_parallel_size=1)
    model = AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(tmp_path), dtype=torch.bfloat16)
    formats = formats_of(model, NeuronConfig.from_dict({"quantization": "int4"}))
    write_formats(formats, tmp_path)  # as an artifact's folder has them
    found, expected = (
        estimate_model(str(tmp_path), options | {"quantization": kind}, ["trn2"], tensor_parallel_size=1)
        for kind in ("checkpoint", "int4")
    )
    assert found.estimates[0].memory == expected.estimates[0].memory


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_bytes_of_codes_are_those_of_the_states(kind: str, tmp_path: Path) -> None:
    sizes = measure_model(TINY_CONFIGS["llama"](), "llama", "bfloat16", trust_remote_code=False)
    for cores in (1, 2):
        core, config = core_sizes(sizes, cores), tiny_config(dtype="bfloat16", kv_cache_dtype=kind)
        states = state_specs(config, core.spec)
        assert cache_bytes(core, config) == byte_count(states)
    TINY_CONFIGS["llama"]().save_pretrained(tmp_path)
    options = {"batch_size": 2, "sequence_length": 128, "kv_cache_dtype": kind, "dtype": "bfloat16"}
    report = estimate_model(str(tmp_path), options, ("trn1", "trn2"), tensor_parallel_size=1)
    assert {each.config.target for each in report.estimates} == ({"trn2"} if kind == "fp8" else {"trn1", "trn2"})
    coded = StateSizes.measure(state_specs(tiny_config(dtype="bfloat16", kv_cache_dtype=kind), sizes.spec)).per_token
    core = core_sizes(sizes, 1)
    assert replace(core, cache_has_codes=True).token_bytes == coded < core.token_bytes
