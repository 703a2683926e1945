# SPDX-License-Identifier: Apache-2.0
"""An artifact that is not exactly what was exported is refused, with the file, the reason and the remedy."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import artifact_runner, export_tiny, tiny_config, weights_of
from tampering import flipped
from writing import MANIFEST, edit_manifest

from optimum_neuron import NeuronModelForCausalLM
from optimum_neuron.artifact.artifact import MANIFEST_NAME, WEIGHTS_NAME, Artifact, ArtifactError
from optimum_neuron.artifact.weights import allocate_states, write_weights
from optimum_neuron.artifact.writer import write_artifact
from optimum_neuron.step.model_spec import ModelSpec
from optimum_neuron.step.spec import graph_specs


GRAPH = "graphs/token_generation_context64.json"
MODEL = ModelSpec.from_dict(MANIFEST["model"])
TENSORS = {"model.a": torch.arange(12.0).view(3, 4), "model.b": torch.ones(5, dtype=torch.bfloat16)}


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    """A folder like an export's, with made-up graphs and weights."""
    with write_artifact(tmp_path / "artifact") as writer:
        (writer.path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
        for name in MANIFEST["graphs"]:
            (writer.path / "graphs" / f"{name}.json").write_bytes(name.encode() * 9)
        tied = write_weights(TENSORS | {"model.alias": TENSORS["model.a"]}, writer.path)
        sizes = tiny_config(target="cpu").to_dict()
        writer.commit(MANIFEST | {"config": sizes, "target": "cpu", "tied_weights": tied})
    return tmp_path / "artifact"


def load(path: Path) -> dict[str, torch.Tensor]:
    """What every target does before it runs anything."""
    artifact = Artifact.open(path)
    artifact.verify()
    return weights_of(artifact)


def flip(file: Path, offset: int = -1) -> None:
    file.write_bytes(flipped(file.read_bytes(), offset))


def test_an_artifact_reads_back_as_it_was_written(artifact: Path) -> None:
    opened, tensors = Artifact.open(artifact), load(artifact)
    assert opened.config == tiny_config(target="cpu")
    assert (opened.model, opened.target, opened.graphs) == (MODEL, "cpu", graph_specs(opened.config))
    assert set(opened.manifest["files"]) == {
        "config.json", WEIGHTS_NAME, GRAPH, "graphs/chunked_prefill_chunk8_context64.json",
        "graphs/mixed_chunk8_context64.json",
    }  # fmt: skip
    assert opened.tied_weights == {"model.alias": "model.a"}
    assert tensors.keys() == {*TENSORS, "model.alias"}
    assert all(
        torch.equal(tensors[name], each) and tensors[name].dtype == each.dtype for name, each in TENSORS.items()
    )
    assert tensors["model.alias"].data_ptr() == tensors["model.a"].data_ptr()


def test_states_are_zeroed_views_of_one_block(artifact: Path) -> None:
    states = allocate_states(Artifact.open(artifact).states())
    assert {name: state.shape for name, state in states.items()} == dict.fromkeys(
        ("kv_cache.key_0", "kv_cache.value_0"), (4, 2, 64, 16)
    )
    assert not any(state.any() for state in states.values())
    assert len({id(state.base) for state in states.values()}) == 1
    states["kv_cache.key_0"].fill(1)
    assert not states["kv_cache.value_0"].any()


MANIFEST_CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = (
    {
        "no format": (lambda m: m.pop("format"), r"has format None, .* made by another program"),
        "other format": (lambda m: m.update(format="other"), r"has format 'other', not"),
        "newer version": (
            lambda m: m.update(format_version=7),
            r"format_version 7, this program reads 1 to 6; .*install",
        ),
        "unknown option": (lambda m: m["config"].update(batchsize=3), r"'batchsize' = 3; did you mean 'batch_size'"),
        "impossible option": (lambda m: m["config"].update(batch_size=0), r"batch_size=0 must be at least 1"),
        "other graphs": (lambda m: m["graphs"].clear(), r"lists the graphs \[\], but its config asks for"),
        "no digest": (lambda m: m["files"][GRAPH].pop("sha256"), r"files\[.*\] lacks sha256"),
        "tied to nothing": (
            lambda m: m.update(tied_weights={"model.alias": "model.gone"}),
            r"lacks model\.gone, which the",
        ),
    }
    | {
        f"no {key}": (lambda m, key=key: m.pop(key), rf"lacks {key}; export the model again")
        for key in ("config", "model", "target", "task", "versions", "graphs", "tied_weights", "target_data", "files")
    }
    | {
        f"path {name}": (
            lambda m, name=name: m["files"].update({name: m["files"].pop("config.json")}),
            r"names .*, which is no path inside the artifact: do not use",
        )
        for name in ("../x", "graphs/../x", "/etc/passwd", "graphs\\x", "c:x", "a/b/c", "./x", "", "a//b", "..")
    }
)
FILE_CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped weights": (lambda path: flip(path / WEIGHTS_NAME), r"model.safetensors was changed after the export"),
    "flipped header length": (lambda path: flip(path / WEIGHTS_NAME, 6), r"model.safetensors was changed"),
    "flipped graph": (lambda path: flip(path / GRAPH), r"context64.json was changed after the export: its sha256 is"),
    "flipped config": (lambda path: flip(path / "config.json"), r"config.json was changed after the export"),
    "truncated": (lambda path: (path / GRAPH).write_bytes(b"x"), r"is truncated: 1 bytes, the manifest says 234"),
    "longer": (lambda path: (path / GRAPH).write_bytes(b"x" * 999), r"is longer than it was: 999 bytes"),
    "missing graph": (lambda path: (path / GRAPH).unlink(), r"context64.json is missing"),
    "missing weights": (lambda path: shutil.rmtree(path / "weights"), r"model.safetensors is missing"),
    "renamed graph": (lambda path: (path / GRAPH).rename(path / "graphs/a.json"), r"was renamed to graphs/a.json"),
    "foreign graph": (lambda path: (path / "graphs/evil.json").touch(), r"evil.json does not belong to this artifact"),
    "foreign weights": (
        lambda path: (path / "weights/x").mkdir(),
        r"weights/x does not belong to this artifact; remove",
    ),
    "no json": (lambda path: (path / MANIFEST_NAME).write_text("{"), r"neuron_config.json is not valid JSON"),
    "no text": (lambda path: (path / MANIFEST_NAME).write_bytes(b"\xff\xfe"), r"neuron_config.json is not valid JSON"),
    "no object": (lambda path: (path / MANIFEST_NAME).write_text("[]"), r"JSON \(it is a list, not an object\)"),
}
DAMAGES = FILE_CHANGES | {
    name: (partial(edit_manifest, change=change), words) for name, (change, words) in MANIFEST_CHANGES.items()
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_artifact_is_refused_by_its_own_reason(artifact: Path, damage: str) -> None:
    apply, words = DAMAGES[damage]
    apply(artifact)
    with pytest.raises(ArtifactError, match=words) as caught:
        load(artifact)
    assert str(artifact) in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *itertools.product(("config", "model", "files", "graphs", "tied_weights", "target_data", "target"), (None, ["x"])),
        *itertools.product(("model", "files", "graphs"), ({}, {"x": 3})),
        ("config", {"batch_size": "3"}), ("model", {"vocab_size": 3, "layers": [{"layer_idx": 0}]}),
        ("files", {"config.json": {"sha256": "x", "size": "31"}}), ("files", {"config.json": {"sha256": 3, "size": 31}}),
    ],
)  # fmt: skip
def test_a_manifest_of_another_shape_is_refused(artifact: Path, key: str, value: object) -> None:
    edit_manifest(artifact, lambda manifest: manifest.update({key: value}))
    with pytest.raises(ArtifactError, match=MANIFEST_NAME):
        load(artifact)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing", "nothing does not exist; name the folder that optimum-cli export neuron wrote"),
        (".", r"\. holds no neuron_config\.json; name the folder that optimum-cli export neuron wrote"),
        ("org/name", r"no folder here; .*: optimum-cli export neuron --model org/name OUT; .*: hf download org/name"),
        ("org/name:q4.gguf", r"optimum-cli export neuron --model org/name:q4\.gguf OUT$"),
    ],
)
def test_a_name_without_an_artifact_is_not_found(
    tmp_path: Path, name: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=words):
        Artifact.open(Path(name))


def test_what_a_repository_holds_beside_an_artifact_is_tolerated(artifact: Path) -> None:
    for name in ("README.md", "assets/figure.png", ".cache/huggingface/download.lock"):
        (artifact / name).parent.mkdir(parents=True, exist_ok=True)
        (artifact / name).write_text("x", encoding="utf-8")
    load(artifact)


def test_an_artifact_opens_without_its_graphs_where_they_are_not_wanted(artifact: Path) -> None:
    shutil.rmtree(artifact / "graphs")
    with pytest.raises(ArtifactError, match="is missing"):
        Artifact.open(artifact)
    opened = Artifact.open(artifact, with_graphs=False)
    opened.verify()
    assert set(opened.manifest["files"]) == {"config.json", WEIGHTS_NAME}
    with pytest.raises(ArtifactError, match=f"lists no file {GRAPH}"):
        opened.file(GRAPH)


def test_an_eager_artifact_verifies_its_config_before_it_builds_a_model(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = export_tiny(tiny_checkpoint, tmp_path / "artifact")
    artifact_runner(path)
    config = (path / "config.json").read_text(encoding="utf-8")
    for changed in (config.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-01'), config.replace("{", "[", 1)):
        (path / "config.json").write_text(changed, encoding="utf-8")
        for load_from in (artifact_runner, NeuronModelForCausalLM.from_pretrained):
            with pytest.raises(ArtifactError, match=r"config.json was changed after the export"):
                load_from(path)
