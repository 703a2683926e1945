# SPDX-License-Identifier: Apache-2.0
"""Compiled code says what it was compiled for, and is not loaded for anything else."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from helpers import Opener, artifact_runner, export_tiny, generate, random_tokens, tiny_config
from tampering import MANIFEST, WEIGHTS, read_json, write

from optimum_neuron.artifacts.artifact import ArtifactError
from optimum_neuron.graphs.spec import ConvolutionState, LayerCache, ModelSpec, graph_specs
from optimum_neuron.targets.cpu import kernels, loader
from optimum_neuron.targets.cpu.package import Facts, check_constants, check_description, describe, read_description


SPEC = graph_specs(tiny_config(target="cpu"))[0]
GRAPH = f"graphs/{SPEC.name}.pt2"
FACTS = Facts(
    ModelSpec(300, (LayerCache(0, 2, 16, 16),), num_embeddings=300), "float32", "optimum_neuron_0123456789ab", "0" * 64
)
CONSTANTS = {"model.a": torch.ones(2, 3), "kv_cache.key_0": torch.ones(4, dtype=torch.bfloat16)}
MEMBER = "data/aotinductor/model/x.wrapper_metadata.json"


def pack(path: Path, *metadata: dict[str, str]) -> Path:
    """A package without code."""
    with zipfile.ZipFile(path, "w") as package:
        package.writestr("data/aotinductor/model/x.so", b"code" * 100)
        for index, each in enumerate(metadata):
            package.writestr(MEMBER.replace("x", str(index)), json.dumps({"AOTI_DEVICE_KEY": "cpu", **each}))
    return path


@pytest.fixture
def description(tmp_path: Path) -> dict[str, Any]:
    metadata = describe(SPEC, FACTS, CONSTANTS)
    found = read_description(pack(tmp_path / "a.pt2", metadata, metadata))  # the compiler writes it twice
    assert found is not None
    return found


def test_a_package_fits_what_it_was_compiled_for(description: dict[str, Any]) -> None:
    check_description(description, SPEC, FACTS)
    check_constants(description, list(CONSTANTS), CONSTANTS)


OTHER_SIZES = {field.name: 7 for field in dataclasses.fields(SPEC) if isinstance(getattr(SPEC, field.name), int)}
OTHER_FACTS: dict[str, dict[str, Any]] = {
    "heads": {"model": ModelSpec(300, (LayerCache(0, 4, 16, 16),), num_embeddings=300)},
    "words": {"model": ModelSpec(301, FACTS.model.layers, num_embeddings=300)},
    "convolutions": {"model": ModelSpec(300, FACTS.model.layers, (ConvolutionState(0, 0, 3, 8),), num_embeddings=300)},
    "type": {"dtype": "bfloat16"},
    "no kernels": {"namespace": None, "library": None},
    "other kernels": {"library": "1" * 64},
    "other operators": {"namespace": "optimum_neuron_ba9876543210"},
}


@pytest.mark.parametrize("field", [*OTHER_SIZES, "kind"])
def test_a_package_of_another_graph_is_refused(description: dict[str, Any], field: str) -> None:
    other = dataclasses.replace(SPEC, **{field: OTHER_SIZES.get(field, "mixed")})
    with pytest.raises(ValueError, match=rf"compiled for {field}=.*, and the artifact has"):
        check_description(description, other, FACTS)


@pytest.mark.parametrize("name", OTHER_FACTS)
def test_a_package_of_another_model_or_library_is_refused(description: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=r"it was compiled for .*, and the artifact has"):
        check_description(description, SPEC, dataclasses.replace(FACTS, **OTHER_FACTS[name]))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"model.a": torch.ones(3, 2)}, r"model\.a as float32 \[2, 3\], and the artifact has float32 \[3, 2\]"),
        ({"model.a": torch.ones(2, 3, dtype=torch.int32)}, r"float32 \[2, 3\], and the artifact has int32 \[2, 3\]"),
        ({}, r"needs model\.a, which the artifact lacks"),
        (
            {"model.a": torch.ones(2, 3), "model.b": torch.ones(1)},
            r"takes model\.b, of which its metadata say nothing",
        ),
    ],
)
def test_constants_of_another_shape_or_type_are_refused(
    description: dict[str, Any], tensors: dict[str, torch.Tensor], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        check_constants(description, ["model.a", *tensors], tensors)


@pytest.mark.parametrize(
    "metadata",
    [
        [],
        [{}],
        [{"optimum_neuron": '{"graph": {}}'}],  # another version's
        [{"optimum_neuron": "{}"}, {}],
    ],
)
def test_a_package_that_does_not_say_what_it_was_compiled_for(tmp_path: Path, metadata: list[dict[str, str]]) -> None:
    assert read_description(pack(tmp_path / "a.pt2", *metadata)) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: data.replace(b"code", b"c0de", 1),
        lambda data: data.replace(b"AOTI", b"A0TI", 1),
        lambda data: data[:-3] + b"\xff\xff\xff",
    ],
)
def test_a_damaged_package_is_refused(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = pack(tmp_path / "a.pt2", describe(SPEC, FACTS, CONSTANTS))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=r"it is no package|is damaged|larger than itself"):
        read_description(path)


def forbidden(*_: object, **__: object) -> NoReturn:
    raise AssertionError("must not be called")


@pytest.fixture
def artifact(cpu_artifact: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of the compiled Llama, to be changed."""
    return Path(shutil.copytree(cpu_artifact("llama"), tmp_path / "artifact"))


def with_metadata(data: bytes, change: Callable[[str], str]) -> bytes:
    """A package with other metadata."""
    with zipfile.ZipFile(io.BytesIO(data)) as package:
        members = {each.filename: package.read(each) for each in package.infolist()}
    output = io.BytesIO()
    with zipfile.ZipFile(output, "w") as package:
        for name, member in members.items():
            text = change(member.decode()).encode() if name.endswith("_metadata.json") else member
            package.writestr(name, text)
    return output.getvalue()


@pytest.mark.slow
def test_no_code_is_loaded_for_another_graph(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "load", forbidden)
    monkeypatch.setattr(loader, "_load_package", forbidden)
    other = next(path for path in sorted((artifact / "graphs").glob("mixed*.pt2")))
    write(artifact, GRAPH, other.read_bytes())
    with pytest.raises(ArtifactError, match=rf"{SPEC.name}\.pt2 cannot be used: it was compiled for kind='mixed'"):
        artifact_runner(artifact)


@pytest.mark.slow
def test_a_graph_that_the_manifest_does_not_list_is_not_loaded(artifact: Path) -> None:
    manifest = read_json(artifact / MANIFEST)
    manifest["files"] = {name: each for name, each in manifest["files"].items() if not name.startswith("graphs/")}
    (artifact / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"lists no file graphs/.*\.pt2"):
        artifact_runner(artifact)


@pytest.mark.slow
def test_code_of_before_it_was_described_is_compiled_again(
    artifact: Path, open_runner: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    data = with_metadata((artifact / GRAPH).read_bytes(), lambda text: text.replace("optimum_neuron", "other", 1))
    write(artifact, GRAPH, data)
    with caplog.at_level(logging.WARNING, "optimum_neuron"):
        tokens = generate(artifact_runner(artifact), random_tokens(21), 8)[0]
    assert tokens == generate(open_runner("llama"), random_tokens(21), 8)[0]
    assert any("do not say what they were compiled for" in message for message in caplog.messages)


@pytest.fixture(scope="module")
def without_code(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of the cpu target whose graphs are still to be compiled."""
    path = export_tiny(tiny_checkpoint, tmp_path_factory.mktemp("plain") / "artifact")
    edit(path, lambda manifest: (manifest.update(target="cpu"), manifest["config"].update(target="cpu")))
    return path


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = read_json(path / MANIFEST)
    change(manifest)
    (path / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")


def transpose_head(path: Path) -> None:
    data = (path / WEIGHTS).read_bytes()
    write(path, WEIGHTS, data.replace(b"[300,64]", b"[64,300]", 1))


UNCOMPILABLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "heads": (
        lambda path: edit(path, lambda m: m["model"]["layers"][1].update(kv_heads=4)),
        r"says layers\[1\]\.kv_heads=4, and the model of config\.json has 2",
    ),
    "weights": (transpose_head, r"lm_head\.weight as torch\.float32 \[64, 300\], and the model"),
    "type": (lambda path: edit(path, lambda m: m["config"].update(dtype="bfloat16")), r"says dtype='bfloat16'"),
    "no model": (lambda path: write(path, "config.json", b"{}"), r"config\.json cannot be read"),
    "tied": (
        lambda path: edit(path, lambda m: m.update(tied_weights={"model.a": "model.b"})),
        r"lacks model\.b, which the manifest ties weights to",
    ),
}


@pytest.mark.parametrize("name", UNCOMPILABLE)
def test_nothing_is_compiled_from_what_contradicts_itself(
    without_code: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(shutil.copytree(without_code, tmp_path / "artifact"))
    change, words = UNCOMPILABLE[name]
    change(path)
    monkeypatch.setattr(loader, "compile_graphs", forbidden)
    with pytest.raises(ValueError, match=words) as caught:
        artifact_runner(path, trust_native_code=False)
    assert "\n" not in str(caught.value)


def test_graphs_are_compiled_from_listed_files_alone(
    without_code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(shutil.copytree(without_code, tmp_path / "artifact"))
    (path / "modeling_other.py").write_text("raise SystemExit", encoding="utf-8")
    found: list[str] = []

    def record(job: Any) -> NoReturn:
        found.extend(each.name for each in job.folder.iterdir())
        raise RuntimeError("enough")

    monkeypatch.setattr(loader, "compile_graphs", record)
    with pytest.raises(RuntimeError, match="enough"):
        artifact_runner(path, trust_native_code=False)
    assert "config.json" in found and "modeling_other.py" not in found
