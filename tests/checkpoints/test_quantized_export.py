# SPDX-License-Identifier: Apache-2.0
"""An artifact with quantized weights computes what transformers does with the dequantized ones, at any cut and beside any neighbour."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tampering
import torch
from helpers import artifact_runner, prefill_pieces
from quantized_files import check_export_refused, dequantized_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from optimum_neuron import NeuronModelForCausalLM
from optimum_neuron.artifact.artifact import WEIGHTS_NAME, Artifact
from optimum_neuron.artifact.quantization import QUANTIZATION_NAME
from optimum_neuron.config import NeuronConfig
from optimum_neuron.export.recipe import export_model


SIZES = {
    "batch_size": 3, "sequence_length": 96, "prefill_chunk_size": 16, "output_logits": True, "dtype": "float32",
    "activations": "none",
}  # fmt: skip
FORMATS: dict[str, dict[str, Any]] = {
    "int8": {"quantization": "int8"}, "int4": {"quantization": "int4"},
    "int4 with a zero point": {"quantization": "int4", "quantization_zero_point": True, "quantization_group_size": 64},
    "fp8": {"quantization": "fp8"},
}  # fmt: skip
TARGETS = ("eager", "cpu")
TIED_FILES = ["config.json", "model.safetensors", "generation_config.json"]
Export = Callable[[str, str, str], Path]


def _export(checkpoint: Path, output: Path, **options: Any) -> Path:
    return export_model(checkpoint, output, config=NeuronConfig.from_dict({**SIZES, **options}))


@pytest.fixture(scope="module")
def exported(sharp_checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Export:
    @cache
    def export(name: str, form: str, target: str) -> Path:
        output = tmp_path_factory.mktemp("quantized") / "artifact"
        return _export(sharp_checkpoints[name], output, target=target, **FORMATS[form])

    return export


def _prompt(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 300, 41, dtype=np.int32)


@pytest.mark.parametrize(
    ("name", "form", "target"),
    [
        *(("llama", form, target) for form in FORMATS for target in TARGETS),
        *(("deepseek_v3", form, "eager") for form in FORMATS),
        ("gpt_oss", "int4", "eager"),
        ("deepseek_v3", "int8", "cpu"), ("gpt_oss", "int4 with a zero point", "cpu"),
    ],
)  # fmt: skip
def test_logits_are_those_of_the_dequantized_weights(
    name: str, form: str, target: str, exported: Export, sharp_checkpoints: dict[str, Path]
) -> None:
    artifact = exported(name, form, target)
    peer, kinds = dequantized_model(artifact)
    assert FORMATS[form]["quantization"] in kinds
    ids = torch.from_numpy(_prompt(0))[None].long()
    found = NeuronModelForCausalLM.from_pretrained(artifact).generate(
        ids, max_new_tokens=4, min_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    with torch.no_grad():
        expected = peer(found.sequences[:, :-1]).logits[:, -4:]
        plain = AutoModelForCausalLM.from_pretrained(sharp_checkpoints[name], dtype=torch.float32)
        unquantized = plain(found.sequences[:, :-1]).logits[:, -4:]
    logits = torch.stack(found.logits, 1)
    spread = expected.amax() - expected.amin()
    assert (logits - expected).abs().amax() < 1e-5 * spread
    assert (unquantized - expected).abs().amax() > 1e-3 * spread  # so it is not the plain weights that were run


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("form", FORMATS)
def test_cuts_and_neighbours_change_no_bit(form: str, target: str, exported: Export) -> None:
    runner = artifact_runner(exported("llama", form, target))
    prompt = _prompt(1)
    cuts = ([16, 16, 9], [1, 2, 16, 16, 6], [7, 13, 5, 16])
    first, *others = (prefill_pieces(runner, slot, prompt, pieces) for slot, pieces in enumerate(cuts))
    assert all(torch.equal(each, first) for each in others)


def test_layers_are_chosen_by_name(tiny_checkpoint: Path, tmp_path: Path) -> None:
    excluded = ("lm_head", "*.layers.0.*", "*.o_proj")
    _export(tiny_checkpoint, tmp_path / "out", target="eager", quantization="int8", quantization_exclude=excluded)
    modules = json.loads((tmp_path / "out" / QUANTIZATION_NAME).read_text())["weights"]
    names = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj")
    assert {name.rpartition(".")[2] for name in modules} == set(names)
    assert all(name.startswith("model.layers.1.") for name in modules)
    artifact = Artifact.open(tmp_path / "out")
    assert artifact.config.quantization_exclude == excluded
    assert artifact.manifest["format_version"] == 5


def test_undivided_layers_are_int8(tiny_checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _export(tiny_checkpoint, tmp_path / "out", target="eager", quantization="int4", quantization_group_size=64)
    modules = json.loads((tmp_path / "out" / QUANTIZATION_NAME).read_text())["weights"]
    kinds = {name.rpartition(".")[2]: form["kind"] for name, form in modules.items()}
    assert kinds["lm_head"] == "int8" and kinds["q_proj"] == "int4"
    assert kinds["down_proj"] == "int8"  # 96 inputs
    told = "2 weights, as model.layers.0.mlp.down_proj.weight with 96 inputs, are no whole number of groups of 64"
    assert told in caplog.text
    tensors = load_file(tmp_path / "out" / WEIGHTS_NAME)
    assert tensors["model.model.layers.0.self_attn.q_proj.codes"].shape == (64, 32)  # two codes to a byte
    assert not any(name.endswith("proj.weight") for name in tensors)


@pytest.mark.parametrize(("kind", "target"), [("int8", "eager"), ("int4", "cpu")])
def test_a_table_that_a_head_has_stays_one(kind: str, target: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(tiny_checkpoint, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "tied")
    shutil.copytree(tiny_checkpoint, tmp_path / "tied", dirs_exist_ok=True, ignore=lambda *_: TIED_FILES)
    artifact = _export(tmp_path / "tied", tmp_path / "out", target=target, quantization=kind)
    tensors = load_file(artifact / WEIGHTS_NAME)
    tables = [name for name, each in tensors.items() if len(each) == 300 and each.dim() == 2]
    assert sorted(name.rpartition(".")[2] for name in tables) == ["codes", "scale"]
    peer, _ = dequantized_model(artifact)
    assert torch.equal(peer.lm_head.weight, peer.model.embed_tokens.weight)
    found = artifact_runner(artifact)
    logits = prefill_pieces(found, 0, _prompt(2), [16, 16, 9])
    with torch.no_grad():
        expected = peer(torch.from_numpy(_prompt(2))[None].long()).logits[0, -1]
    assert (logits - expected).abs().amax() < 1e-5 * (expected.amax() - expected.amin())


@pytest.mark.parametrize(
    ("exclude", "told"), [("*.qproj", r"'\*.qproj' is the name of none of"), ("*", "finds nothing to quantize")]
)
def test_patterns_for_nothing_are_refused(exclude: str, told: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"quantization": "int8", "quantization_exclude": (exclude,)}
    check_export_refused(told, tiny_checkpoint, tmp_path / "out", **options)


def test_weights_that_are_no_numbers_are_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint)
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = torch.nan
    model.save_pretrained(tmp_path / "broken")
    shutil.copytree(tiny_checkpoint, tmp_path / "broken", dirs_exist_ok=True, ignore=lambda *_: ["model.safetensors"])
    words = "layers.1.mlp.up_proj.weight holds NaN or infinity in 1 of 6,144 places"
    check_export_refused(words, tmp_path / "broken", tmp_path / "out", quantization="int4")


_LAYER = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda modules: modules.pop(_LAYER), f"lack model.{_LAYER}.weight"),
        (lambda modules: modules[_LAYER].update(kind="int4"), "codes"),
        (lambda modules: modules[_LAYER].update(groups=7), "does not fit config.json: scales"),
        (lambda modules: modules[_LAYER].update(groups=2), "scale"),
        (lambda modules: modules[_LAYER].update(scale="float64"), "cannot be read"),
        (lambda modules: modules[_LAYER].update(has_shift=True), "lack model.*shift"),
        (lambda modules: modules.update({"model.norm": modules[_LAYER]}), "has no linear layer, table or experts model.norm"),
        (lambda modules: modules.update({"../x": modules[_LAYER]}), "has no linear layer"),
    ],
)  # fmt: skip
def test_a_changed_description_is_told(
    change: Callable[[dict[str, Any]], None], told: str, exported: Export, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(exported("llama", "int8", "eager"), tmp_path / "artifact"))
    document = json.loads((folder / QUANTIZATION_NAME).read_text())
    change(document["weights"])
    tampering.write(folder, QUANTIZATION_NAME, json.dumps(document).encode())
    with pytest.raises(ValueError, match=told):
        NeuronModelForCausalLM.from_pretrained(folder)
