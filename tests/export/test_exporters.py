# SPDX-License-Identifier: Apache-2.0
"""The format "neuron" of transformers' exporters: a model in memory becomes an artifact, and what does not fit is refused before."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import SIZES
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.exporters import AutoExportConfig, AutoHfExporter, get_hf_exporter

from optimum_neuron import NeuronModelForCausalLM
from optimum_neuron.export.exporters import NeuronExportConfig, NeuronExporter


OPTIONS: dict[str, Any] = {**SIZES, "dtype": "auto", "output_logits": False}
NEW_TOKENS = 8


@pytest.fixture(scope="module")
def model(sharp_checkpoints: dict[str, Path]) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(sharp_checkpoints["llama"], dtype=torch.float32).eval()
    model.lm_head.weight.data = model.lm_head.weight.data.roll(7, dims=0)
    return model


@pytest.fixture(scope="module")
def inputs() -> dict[str, Tensor]:
    ids = torch.randint(3, 300, (2, 11), generator=torch.Generator().manual_seed(5))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def config_for(output: Path, **changes: Any) -> NeuronExportConfig:
    return NeuronExportConfig(output, **OPTIONS | changes)


def test_the_registered_exporter_writes_an_artifact_whose_tokens_are_those_of_transformers(
    model: PreTrainedModel,
    inputs: dict[str, Tensor],
    tmp_path: Path,
    scratch: Path,
    sharp_checkpoints: dict[str, Path],
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(sharp_checkpoints["llama"])
    config = AutoExportConfig.from_dict({"export_format": "neuron", "output_path": tmp_path / "out", **OPTIONS})
    exporter = AutoHfExporter.from_config(config, tokenizer=tokenizer)
    assert isinstance(exporter, NeuronExporter)
    path = exporter.export(model, inputs, config)
    assert path == tmp_path / "out" and not list(scratch.iterdir())
    exported = NeuronModelForCausalLM.from_pretrained(path)
    how = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    assert torch.equal(exported.generate(**inputs, **how), model.generate(**inputs, **how))
    assert AutoTokenizer.from_pretrained(path).chat_template == tokenizer.chat_template


def test_an_artifact_for_generation_is_one_component_and_has_the_defaults_that_it_is_given(
    model: PreTrainedModel, inputs: dict[str, Tensor], tmp_path: Path
) -> None:
    static = {"cache_implementation": "static", "max_cache_len": SIZES["sequence_length"]}
    defaults = GenerationConfig(max_new_tokens=3, **static)
    config = config_for(tmp_path / "out").to_dict()
    for given in (config, {"model": config | {"overwrite": True}}):
        exporter = get_hf_exporter(config)
        paths = exporter.export_for_generation(model, inputs, given, defaults, multi_token_decode=True)
        assert paths == {"model": tmp_path / "out"}
    exported = NeuronModelForCausalLM.from_pretrained(paths["model"])
    assert exported.generate(**inputs).shape[1] == inputs["input_ids"].shape[1] + 3
    assert defaults.cache_implementation == "static" and exported.generation_config.cache_implementation is None


def test_a_config_survives_json_and_wrong_options_are_told_of_where_they_are_given(tmp_path: Path) -> None:
    config = config_for(tmp_path, prefill_chunk_buckets=(2, 4))
    assert AutoExportConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert dict(config) == config.to_dict() and "prefill_chunk_buckets=[2, 4]" in repr(config)
    assert config.neuron_config.prefill_chunk_buckets == (2, 4) and config.to_dict()["export_format"] == "neuron"
    with pytest.raises(TypeError, match="batchsize"):
        config_for(tmp_path, batchsize=2)
    with pytest.raises(ValueError, match="batch_size=0 must be at least 1"):
        config_for(tmp_path, batch_size=0)
    with pytest.raises(ValueError, match="export_format='onnx' is not 'neuron'"):
        config_for(tmp_path, export_format="onnx")


@pytest.mark.parametrize(
    ("tells", "sample"),
    [
        ("has pixel_values, and an artifact takes input_ids and attention_mask", {"pixel_values": torch.ones(1, 1)}),
        (r"has past_key_values, and", {"past_key_values": object()}),
        (r"shape \[4, 2\], and the artifact takes up to batch_size=3", {"input_ids": torch.ones(4, 2)}),
        (r"shape \[1, 65\], and .* sequence_length=64", {"input_ids": torch.ones(1, 65)}),
        (r"shape \[5\], and", {"attention_mask": torch.ones(5)}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_inputs_that_an_artifact_cannot_take_are_refused_and_nothing_is_written(
    tells: str, sample: dict[str, Any], model: PreTrainedModel, tmp_path: Path, scratch: Path
) -> None:
    with pytest.raises(ValueError, match=tells):
        NeuronExporter().export(model, sample, config_for(tmp_path / "out"))
    assert not (tmp_path / "out").exists() and not list(scratch.iterdir())


def test_what_is_no_model_or_config_of_it_is_refused(model: PreTrainedModel, tmp_path: Path, scratch: Path) -> None:
    exporter, config = NeuronExporter(), config_for(tmp_path / "out")
    with pytest.raises(TypeError, match="the model is a Linear; give a transformers model"):
        exporter.export(nn.Linear(2, 2), None, config)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="config is a str"):
        exporter.export(model, None, "out")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="names the components decode, prefill, and an artifact is one"):
        exporter.export_for_generation(model, None, {"prefill": config, "decode": config})
    with pytest.raises(ValueError, match="cache_implementation='quantized' is no cache of an artifact"):
        exporter.export_for_generation(model, None, config, GenerationConfig(cache_implementation="quantized"))
    with pytest.raises(ValueError, match="max_cache_len=32 differs from sequence_length=64"):
        static = GenerationConfig(cache_implementation="static", max_cache_len=32)
        exporter.export_for_generation(model, None, config, static)
    assert not (tmp_path / "out").exists() and not list(scratch.iterdir())
