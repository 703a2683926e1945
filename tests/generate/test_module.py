# SPDX-License-Identifier: Apache-2.0
"""What tools of the Hugging Face world ask of a model is answered as transformers does, or refused by name."""

from __future__ import annotations

import copy
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import export_tiny
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, pipeline
from transformers.utils import logging as transformers_logging

from optimum_neuron import NeuronConfig, NeuronModelForCausalLM
from optimum_neuron.artifact.artifact import WEIGHTS_NAME
from optimum_neuron.export.exporters import NeuronExportConfig
from optimum_neuron.runtime.defaults import warn_once


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def pair(
    request: pytest.FixtureRequest, tiny_checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Any]:
    """The same checkpoint here and in transformers; Gemma 2's head is tied to its embedding."""
    folder = tiny_checkpoints[request.param]
    path = export_tiny(folder, tmp_path_factory.mktemp("module") / "artifact")
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return NeuronModelForCausalLM.from_pretrained(path), reference


def test_sizes_are_those_of_transformers(pair: tuple[Any, Any]) -> None:
    ours, theirs = pair
    assert ours.num_parameters() == theirs.num_parameters()
    assert ours.num_parameters(exclude_embeddings=True) == theirs.num_parameters(exclude_embeddings=True)
    assert ours.num_parameters(only_trainable=True) == 0
    for buffers in (True, False):
        assert ours.get_memory_footprint(buffers) == theirs.get_memory_footprint(buffers)


@pytest.mark.parametrize(("name", "form"), [("gemma2", "int4"), ("gpt_oss", "int8")])
def test_a_quantized_weight_counts_as_the_plain_one_and_takes_what_its_codes_take(
    name: str, form: str, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Of packed codes, a tied table, and experts."""
    path = export_tiny(tiny_checkpoints[name], tmp_path / "artifact", quantization=form)
    ours = NeuronModelForCausalLM.from_pretrained(path)
    theirs = AutoModelForCausalLM.from_pretrained(tiny_checkpoints[name])
    for without in (True, False):
        assert ours.num_parameters(exclude_embeddings=without) == theirs.num_parameters(exclude_embeddings=without)
    assert ours.get_memory_footprint() == sum(each.nbytes for each in load_file(path / WEIGHTS_NAME).values())
    assert ours.get_memory_footprint() < theirs.get_memory_footprint()


def test_a_model_stays_what_it_was_compiled_as(pair: tuple[Any, Any]) -> None:
    ours, _ = pair
    same = (
        ours.float(), ours.to("cuda"), ours.to(torch.float32), ours.to(dtype=torch.float32), ours.cpu(), ours.cuda(0),
        ours.eval(), ours.train(False), ours.requires_grad_(False),
    )  # fmt: skip
    assert all(each is ours for each in same) and not ours.training
    assert ours.name_or_path == str(ours.artifact.path)
    for change in (ours.half, lambda: ours.to("cpu", torch.float16), lambda: ours.to(dtype=torch.float16)):
        with pytest.raises(ValueError, match=r"compute in float32 and cannot change to float16; .* --dtype float16"):
            change()
    with pytest.raises(ValueError, match=r"cannot change to bfloat16; .* --dtype bfloat16"):
        ours.bfloat16()
    for change in (ours.train, ours.requires_grad_):
        with pytest.raises(ValueError, match="compiled graphs cannot be trained"):
            change()


def test_what_graphs_do_not_have_is_said_by_name(pair: tuple[Any, Any]) -> None:
    ours, _ = pair
    for name in ("get_input_embeddings", "parameters", "state_dict", "modules", "resize_token_embeddings", "double"):
        assert not hasattr(ours, name)
        with pytest.raises(AttributeError, match=rf"has no {name}: its layers and weights are compiled"):
            getattr(ours, name)
    with pytest.raises(AttributeError, match=r"object has no attribute 'nonsense'$"):
        ours.nonsense  # noqa: B018
    assert copy.copy(ours).runner is ours.runner


def test_a_pipeline_knows_the_model(
    pair: tuple[Any, Any], tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transformers_logging.get_logger("transformers"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        pipeline("text-generation", model=pair[0], tokenizer=AutoTokenizer.from_pretrained(tiny_checkpoint))
    assert caplog.text == ""


def test_keywords_of_transformers_that_change_nothing_are_taken_and_logged_once(
    pair: tuple[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    path = pair[0].artifact.path
    inert = {"device_map": "auto", "low_cpu_mem_usage": True, "attn_implementation": "sdpa", "use_safetensors": True}
    warn_once.cache_clear()
    for _ in range(2):
        NeuronModelForCausalLM.from_pretrained(path, **inert, max_memory=None)
    told = sorted(f"{name}={value!r}" for name, value in inert.items())
    assert sorted(message.split(" has no effect: ")[0] for message in caplog.messages) == told
    for dtype in (torch.float32, "float32", "torch.float32", "fp32", "FP32", "float", "auto", None):
        for name in ("dtype", "torch_dtype"):
            NeuronModelForCausalLM.from_pretrained(path, **{name: dtype})
    for options in ({"torch_dtype": "bf16"}, {"dtype": torch.bfloat16}):
        with pytest.raises(ValueError, match="dtype='bfloat16' differs from the 'float32'"):
            NeuronModelForCausalLM.from_pretrained(path, **options)
    with pytest.raises(ValueError, match=r"torch_dtype=fp16 and dtype=torch\.float32 differ"):
        NeuronModelForCausalLM.from_pretrained(path, torch_dtype="fp16", dtype=torch.float32)
    with pytest.raises(ValueError, match="use_safetensors=False asks for pickled weights"):
        NeuronModelForCausalLM.from_pretrained(path, use_safetensors=False)


@pytest.mark.parametrize(
    ("keyword", "words"),
    [
        ({"gguf_file": "a.gguf"}, "gguf_file='a.gguf' is not understood: name the file in the model"),
        ({"quantization_config": {"load_in_4bit": True}}, "is not understood: name quantization='int8', 'int4' or 'fp8'"),
        ({"num_cores": 2}, "num_cores=2 is not understood: name tensor_parallel_size"),
        ({"config": LlamaConfig()}, "config is a NeuronConfig, not a LlamaConfig"),
        ({"use_cache": False}, "use_cache=False asks for steps without a cache"),
    ],
)  # fmt: skip
def test_keywords_of_other_libraries_are_refused_with_what_does_the_same(
    pair: tuple[Any, Any], keyword: dict[str, Any], words: str
) -> None:
    path = pair[0].artifact.path
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        NeuronModelForCausalLM.from_pretrained(path, **keyword)
    if "config" not in keyword and "use_cache" not in keyword:
        nothing: dict[str, Any] = dict.fromkeys(keyword)
        NeuronModelForCausalLM.from_pretrained(path, **nothing)


def test_an_export_understands_a_type_in_any_spelling(tiny_checkpoint: Path) -> None:
    sizes = {"sequence_length": 32, "prefill_chunk_size": 8, "target": "eager"}
    options = {"export": True, "torch_dtype": torch.bfloat16, "device_map": "cpu"} | sizes
    model = NeuronModelForCausalLM.from_pretrained(tiny_checkpoint, **options)
    assert model.dtype == torch.bfloat16 and model.device == torch.device("cpu")
    assert NeuronConfig(dtype="half").dtype == NeuronConfig(dtype=torch.float16).dtype == "float16"  # type: ignore[arg-type]
    assert json.loads(json.dumps(NeuronExportConfig("out", dtype=torch.float16).to_dict()))["dtype"] == "float16"
    with pytest.raises(ValueError, match="dtype='int8' is not known"):
        NeuronConfig(dtype=torch.int8)  # type: ignore[arg-type]
