# SPDX-License-Identifier: Apache-2.0
"""A changed artifact is refused in a sentence or gives its tokens: no crash, no traceback, no hang."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import artifact_runner, export_tiny, generate, random_tokens
from safetensors.torch import load_file, save_file
from tampered import failures
from tampering import MANIFEST, WEIGHTS, changes, read_json, with_header, write
from writing import edit_manifest

from optimum_neuron.artifact.artifact import Artifact, ArtifactError
from optimum_neuron.artifact.manifest import config_of, describe_graph
from optimum_neuron.generate.model import NeuronModelForCausalLM
from optimum_neuron.step.model_spec import ModelSpec
from optimum_neuron.step.spec import graph_specs


# `python tests/helpers/tampered.py ARTIFACT` tries all changes.
EVERY = 37


@pytest.fixture(scope="module")
def eager_artifact(sharp_checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_tiny(sharp_checkpoints["llama"], tmp_path_factory.mktemp("eager") / "artifact")


@pytest.mark.slow
def test_a_changed_artifact_is_refused_or_gives_its_tokens(
    eager_artifact: Path, cpu_artifact: Callable[[str], Path]
) -> None:
    assert len(changes(eager_artifact)) > 600
    assert failures(eager_artifact, EVERY) == []
    assert failures(cpu_artifact("llama"), 3 * EVERY) == []  # it holds code, too


def test_weights_that_are_no_numbers_do_not_generate(artifact: Path) -> None:
    weights = load_file(artifact / WEIGHTS)
    save_file({name: torch.full_like(tensor, torch.nan) for name, tensor in weights.items()}, artifact / WEIGHTS)
    write(artifact, WEIGHTS, (artifact / WEIGHTS).read_bytes())
    with pytest.raises(ArtifactError, match=r"holds NaN or infinity in \d+ of \d+ places; export the model again"):
        NeuronModelForCausalLM.from_pretrained(artifact)


@pytest.fixture
def artifact(eager_artifact: Path, tmp_path: Path) -> Path:
    """A copy, to be changed."""
    return Path(shutil.copytree(eager_artifact, tmp_path / "artifact"))


def edit_layers(manifest: dict[str, Any], **sizes: int) -> None:
    for layer in manifest["model"]["layers"]:
        layer.update(sizes)


def tie(manifest: dict[str, Any], **names: str) -> None:
    manifest["tied_weights"] = {f"model.{alias}.weight": f"model.{stored}.weight" for alias, stored in names.items()}


CONTRADICTIONS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "fewer slots": (lambda m: m["config"].update(batch_size=2), r"has batch_size 3, and its config .* ask for 2"),
    "a text": (lambda m: m["config"].update(batch_size="3"), r"batch_size must be a whole number, not '3'"),
    "code": (lambda m: edit_layers(m, kv_heads="2; abort()"), r"kv_heads is '2; abort\(\)', not a whole number"),
    "no heads": (lambda m: edit_layers(m, kv_heads=0), r"layers\[0\]\.kv_heads is 0, not a whole number from 1 to"),
    "other heads": (lambda m: edit_layers(m, kv_heads=4), r"kv_heads=4, and the model of config\.json has 2"),
    "other keys": (lambda m: edit_layers(m, key_dim=8), r"key_dim=8, and the model of config\.json has 16"),
    "one layer twice": (lambda m: edit_layers(m, layer_idx=0), r"describes the state kv_cache\.key_0 twice"),
    "other words": (lambda m: m["model"].update(vocab_size=301), r"300, and its config and model ask for 301"),
    "no type": (lambda m: m["config"].pop("dtype"), r"dtype='auto' .*, where the artifact's target 'eager', a type"),
    "another target": (lambda m: m.update(target="cpu"), r"has target='eager', .*, where the artifact's target 'cpu'"),
    "ranks": (lambda m: m["config"].update(tensor_parallel_size=2**30), r"lists 1 files of weights, and has tensor"),
    "a chain": (lambda m: tie(m, a="b", b="lm_head"), r"tied to 'model\.b\.weight', which is itself tied to another"),
    "a stored alias": (lambda m: tie(m, **{"model.norm": "lm_head"}), r"holds model\.model\.norm\.weight, which the"),
    "true": (lambda m: m["files"][WEIGHTS].update(size=True), r"size is True, not a whole number"),
    "a digest": (lambda m: m["files"][WEIGHTS].update(sha256="0"), r"sha256 is '0', not a text of the form"),
    "a version": (lambda m: m.update(format_version=True), r"has format_version True"),
    "no config.json": (lambda m: m["files"].pop("config.json"), r"does not list config\.json"),
    "another type": (lambda m: m["config"].update(dtype="bfloat16"), r"dtype='bfloat16', and the artifact's weights"),
    "a level": (lambda m: m["target_data"].update(lnc=99), r"lnc is 99, not a whole number from 1 to 16"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_manifest_that_contradicts_itself_or_the_model_is_refused(artifact: Path, name: str) -> None:
    change, words = CONTRADICTIONS[name]
    edit_manifest(artifact, change)
    with pytest.raises(ValueError, match=words) as caught:
        artifact_runner(artifact)
    assert MANIFEST in str(caught.value) or str(artifact) in str(caught.value)


def test_a_manifest_with_other_convolutions_than_the_models_is_refused(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    path = export_tiny(tiny_checkpoints["lfm2"], tmp_path / "artifact")
    edits: tuple[Callable[[dict[str, Any]], object], ...] = (
        lambda m: m["model"]["convolutions"][0].update(past=4), lambda m: m["model"].pop("convolutions"),
    )  # fmt: skip
    for edit, told in zip(edits, ("4", r"\[\]"), strict=True):
        edit_manifest(path, edit)
        with pytest.raises(ValueError, match=rf"says convolutions.*={told}, and the model of config\.json has"):
            artifact_runner(path)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ('{"model.a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', r"at \[0, 4\], and F32 \[2\] takes 8"),
        ('{"model.a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}', r"shape\[0\] is -1"),
        ('{"model.a": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}}', r"begins at 4, and the one before .* at 0"),
        ('{"model.a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}', r"tensors take 4 bytes, and the file holds 8"),
        ('{"model.a": {"dtype": "C64", "shape": [1], "data_offsets": [0, 8]}}', r"dtype is 'C64', not one of F64"),
        ('{"model.a": {"dtype": "U8", "shape": [0, 9223372036854775807, 2], "data_offsets": [0, 0]}}', r"has the shape"),
        ('{"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}, "a": 1}', r"the name 'a' occurs twice"),
        ("[" * 100_000, r"nested too deep"),
        ("{}", r"tensors take 0 bytes, and the file holds 8"),
    ],
)  # fmt: skip
def test_a_header_that_contradicts_the_file_is_refused(artifact: Path, header: str, words: str) -> None:
    write(artifact, WEIGHTS, with_header(header.encode(), bytes(8)))
    with pytest.raises(ArtifactError, match=words) as caught:
        artifact_runner(artifact)
    assert WEIGHTS in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shape": [64, 300]}, r"lm_head\.weight as float32 \[64, 300\], and"),
        ({"dtype": "I32"}, r"lm_head\.weight as int32 \[300, 64\], and the model"),
    ],
)
def test_weights_of_another_shape_or_type_than_the_models_are_refused(
    artifact: Path, change: dict[str, Any], words: str
) -> None:
    data = (artifact / WEIGHTS).read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["model.lm_head.weight"].update(change)
    write(artifact, WEIGHTS, with_header(json.dumps(header).encode(), data[end:]))
    with pytest.raises(ValueError, match=words):
        artifact_runner(artifact)


def test_no_memory_is_taken_for_a_cache_larger_than_the_machine(artifact: Path) -> None:
    manifest = read_json(artifact / MANIFEST)
    manifest["config"] |= {"sequence_length": 2**30, "context_buckets": [2**30]}
    model, specs = ModelSpec.from_dict(manifest["model"]), graph_specs(config_of(manifest))
    manifest["graphs"] = {spec.name: describe_graph(spec, model) for spec in specs}
    write(artifact, MANIFEST, json.dumps(manifest).encode())
    with pytest.raises(ValueError, match=r"the artifact's KV cache takes [\d,.]+ GB, and this machine has"):
        artifact_runner(artifact)


def test_no_model_is_built_that_has_more_layers_than_there_are_weights(artifact: Path) -> None:
    config = read_json(artifact / "config.json") | {"num_hidden_layers": 10**9}
    write(artifact, "config.json", json.dumps(config).encode())
    with pytest.raises(ValueError, match=r"num_hidden_layers=1000000000, and the artifact's weights are \d+ tensors"):
        artifact_runner(artifact)


@pytest.mark.parametrize("name", ["config.json", WEIGHTS, "weights"])
def test_a_link_out_of_the_artifact_is_refused(artifact: Path, name: str, tmp_path: Path) -> None:
    shutil.move(artifact / name, tmp_path / "elsewhere")
    (artifact / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArtifactError, match=r"is a link to .*elsewhere.*, which is outside of the artifact"):
        Artifact.open(artifact)


def test_links_into_the_hubs_own_store_are_followed_and_graphs_need_no_description(
    artifact: Path, eager_artifact: Path, tmp_path: Path
) -> None:
    """Artifacts of before described none."""
    edit_manifest(artifact, lambda manifest: manifest.update(graphs={name: {} for name in manifest["graphs"]}))
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "1", tmp_path / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)
    shutil.copytree(artifact, snapshot)
    for index, path in enumerate(sorted(each for each in snapshot.rglob("*") if each.is_file())):
        shutil.move(path, blobs / str(index))
        path.symlink_to(blobs / str(index))
    prompt = random_tokens(9)
    assert generate(artifact_runner(snapshot), prompt, 4)[0] == generate(artifact_runner(eager_artifact), prompt, 4)[0]


def test_generation_defaults_that_the_manifest_does_not_list_are_not_used(artifact: Path) -> None:
    edit_manifest(artifact, lambda manifest: manifest["files"].pop("generation_config.json"))
    (artifact / "generation_config.json").write_text('{"max_new_tokens": 3}', encoding="utf-8")
    assert NeuronModelForCausalLM.from_pretrained(artifact).generation_config.max_new_tokens is None
