# SPDX-License-Identifier: Apache-2.0
"""A plan says what it was made for, and runs for nothing else; nothing that it says reaches beyond its buffers."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from helpers import artifact_runner, export_tiny, folder_bytes, forbidden, generate, random_tokens, tiny_config
from tampering import MANIFEST, WEIGHTS, read_json, write

from optimum_neuron.artifact.artifact import ArtifactError
from optimum_neuron.kernels import plan as plan_module
from optimum_neuron.kernels.plan import FORMAT, OldPlanError, Plan
from optimum_neuron.kernels.run.encode import encode_step
from optimum_neuron.kernels.steps.access import PlanError
from optimum_neuron.kernels.steps.operands import Buffer, Operand
from optimum_neuron.kernels.steps.steps import Item, Map
from optimum_neuron.step.attention.state import KeyValueState
from optimum_neuron.step.features.convolution.state import ConvolutionState
from optimum_neuron.step.model_spec import ModelSpec
from optimum_neuron.step.spec import SamplingParams, graph_specs
from optimum_neuron.targets.cpu import compiler
from optimum_neuron.targets.cpu.facts import PlanFacts


SPEC = graph_specs(tiny_config(target="cpu"))[0]
GRAPH = f"graphs/{SPEC.name}.json"
FACTS = PlanFacts(SPEC, ModelSpec(300, (KeyValueState(0, 2, 16, 16),), num_embeddings=300), "float32")
TENSORS = {"model.a": torch.ones(2, 3), "kv_cache.key_0": torch.ones(4, dtype=torch.bfloat16)}
A = Operand(0, "float32", 0, (2, 3), (3, 1))
BOUNDED = Map(2, 3, 1, (Item("load", 0, access=A), Item("max", 0, (0, float("-inf")), (False, True), True)))
PLAN = Plan((Buffer("tensor", "model.a", 24), Buffer("arena", "", 64, 128)), (), (BOUNDED,), 192)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    PLAN.save(tmp_path / "plan.json", FACTS.to_dict(), TENSORS)
    return tmp_path / "plan.json"


OTHER_SIZES = {field.name: 7 for field in dataclasses.fields(SPEC) if isinstance(getattr(SPEC, field.name), int)}
OTHER_FACTS: dict[str, dict[str, Any]] = {
    "heads": {"model": ModelSpec(300, (KeyValueState(0, 4, 16, 16),), num_embeddings=300)},
    "words": {"model": ModelSpec(301, FACTS.model.states, num_embeddings=300)},
    "convolutions": {"model": ModelSpec(300, (*FACTS.model.states, ConvolutionState(0, 0, 3, 8)), num_embeddings=300)},
    "type": {"dtype": "bfloat16"},
}


def test_a_plan_is_read_as_it_was_written_and_one_of_another_graph_or_model_is_refused(path: Path) -> None:
    assert Plan.load(path, TENSORS, FACTS.check) == PLAN
    for field in (*OTHER_SIZES, "kind"):
        other = dataclasses.replace(SPEC, **{field: OTHER_SIZES.get(field, "mixed")})
        with pytest.raises(ValueError, match=rf"compiled for graph\.{field}=.*, and the artifact has"):
            Plan.load(path, TENSORS, dataclasses.replace(FACTS, graph=other).check)
    for facts in OTHER_FACTS.values():
        with pytest.raises(ValueError, match=r"it was compiled for .*, and the artifact has"):
            Plan.load(path, TENSORS, dataclasses.replace(FACTS, **facts).check)


def test_tensors_of_another_shape_or_type_are_refused(path: Path) -> None:
    for tensor, words in (
        (torch.ones(3, 2), r"model\.a as float32 \[2, 3\], and the artifact has float32 \[3, 2\]"),
        (torch.ones(2, 3, dtype=torch.int32), r"float32 \[2, 3\], and the artifact has int32 \[2, 3\]"),
        (None, r"needs model\.a, which the artifact lacks"),
    ):
        found = {name: each for name, each in (TENSORS | {"model.a": tensor}).items() if each is not None}
        with pytest.raises(ValueError, match=words):
            Plan.load(path, found, FACTS.check)


def signed(content: dict[str, Any]) -> bytes:
    return plan_module._serialize(content | {"sha256": plan_module._digest(content)}).encode()


def test_a_damaged_plan_or_one_that_does_not_name_its_tensors_and_steps_is_refused(path: Path) -> None:
    data, content, whole = path.read_bytes(), read_json(path), read_json(path)
    del content["tensors"]["model.a"]
    for damaged, words in (
        (b"", "Expecting value"),
        (data[: len(data) // 2], "Unterminated|Expecting"),
        (data.replace(b'"-inf"', b'"inf"'), "its digest is another"),
        (data.replace(b'"float32"', b'"float16"', 1), "compiled for|digest is another"),
        (b"[" + data + b"]", "not an object"),
        (signed(content), r"it uses 'model\.a', of which it says nothing"),
        *(
            (signed(changed(whole, ("steps", 0, "kind"), kind)), "it has the step")
            for kind in ({}, [], None, 3, "Other")
        ),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=words):
            Plan.load(path, TENSORS, FACTS.check)


def test_a_plan_of_another_format_is_not_taken_for_a_damaged_one(path: Path) -> None:
    content = read_json(path)
    for found in (0, FORMAT - 1, FORMAT + 1, "1", None):
        path.write_bytes(json.dumps(content | {"format": found}).encode())
        with pytest.raises(OldPlanError, match=f"this version reads {FORMAT}"):
            Plan.load(path, TENSORS, FACTS.check)


def changed(content: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    copy = json.loads(json.dumps(content))
    inner = copy["plan"]
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return copy


@pytest.fixture
def artifact(cpu_artifact: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(cpu_artifact("llama"), tmp_path / "artifact"))


@pytest.mark.slow
def test_a_plan_of_another_graph_and_steps_in_another_order_are_refused_before_any_runs(artifact: Path) -> None:
    """Every second pair of neighbours of a plan whose digest is right: where one needs the other, the plan is not loaded."""
    content, other = read_json(artifact / GRAPH), next(iter((artifact / "graphs").glob("mixed*.json")))
    write(artifact, GRAPH, other.read_bytes())
    words = rf"{SPEC.name}\.json cannot be used: it was compiled for graph\.kind='mixed'"
    with pytest.raises(ArtifactError, match=words):
        artifact_runner(artifact)
    steps, refused = content["plan"]["steps"], 0
    for first in range(0, len(steps) - 1, 2):
        swapped = [*steps[:first], steps[first + 1], steps[first], *steps[first + 2 :]]
        write(artifact, GRAPH, signed(changed(content, ("steps",), swapped)))
        try:
            generate(artifact_runner(artifact), random_tokens(9), 2)
        except ArtifactError as error:
            words = r"cannot be used: it (reads .* which no step wrote before|does not write all)"
            assert re.search(words, str(error))
            refused += 1
    assert refused > len(steps) // 4


def test_a_constant_that_is_no_float32_is_refused() -> None:
    load = Item("load", 0, access=Operand(0, "float32", 0, (4,), (1,)))
    wrong: list[Any] = [None, "1", [], 1e300, 2**200]
    for number in wrong:
        with pytest.raises(PlanError, match="which is no float32"):
            encode_step(Map(1, 4, 2, (load, Item("add", 1, (0, number), (False, True)))), [Buffer("output", "0", 16)])


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


def transpose_embeddings(path: Path) -> None:
    data = (path / WEIGHTS).read_bytes()
    write(path, WEIGHTS, data.replace(b"[300,64]", b"[64,300]", 1))


def give_an_earlier_sampler(manifest: dict[str, Any]) -> None:
    manifest["config"]["max_topk"] = 256
    for graph in manifest["graphs"].values():
        for each in graph["inputs"]:
            if each["name"].endswith(".sampling_params"):
                each["shape"][1] = 3


@pytest.mark.slow
def test_an_artifact_with_an_earlier_sampler_is_compiled_again(
    artifact: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sampling = SamplingParams(top_k=299, temperature=1.0)
    asked = random_tokens(9), 4, sampling, [0.2, 0.9, 0.5, 0.7]
    expected, _ = generate(artifact_runner(artifact), *asked)
    for path in (artifact / "graphs").glob("*.json"):
        write(artifact, f"graphs/{path.name}", json.dumps(read_json(path) | {"format": FORMAT - 1}).encode())
    edit(artifact, give_an_earlier_sampler)
    before = folder_bytes(artifact)
    assert generate(artifact_runner(artifact), *asked)[0] == expected and folder_bytes(artifact) == before
    assert "compiling the graphs" in caplog.text and f"it has the format {FORMAT - 1}" in caplog.text
    edit(artifact, lambda manifest: manifest["config"].pop("max_topk"))
    with pytest.raises(ArtifactError, match=r"shape\[1\] 3, .* ask for 4; export the model again"):
        artifact_runner(artifact)


UNCOMPILABLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "heads": (
        lambda path: edit(path, lambda m: m["model"]["layers"][1].update(kv_heads=4)),
        r"says layers\[1\]\.kv_heads=4, and the model of config\.json has 2",
    ),
    "weights": (transpose_embeddings, r"embed_tokens\.weight as float32 \[64, 300\], and the model"),
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
    monkeypatch.setattr(compiler, "compile_graphs", forbidden)
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

    monkeypatch.setattr(compiler, "compile_graphs", record)
    with pytest.raises(RuntimeError, match="enough"):
        artifact_runner(path, trust_native_code=False)
    assert "config.json" in found and "modeling_other.py" not in found
