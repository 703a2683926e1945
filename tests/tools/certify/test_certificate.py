# SPDX-License-Identifier: Apache-2.0
"""Certificates: written by an export, all or nothing; read strictly; repeated by `neuron inspect --verify`."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import export_tiny, tiny_config
from optimum.commands.register.neuron import NeuronInspectCommand
from tampering import read_json, write

from optimum_neuron.artifact.artifact import MANIFEST_NAME, Artifact, ArtifactError
from optimum_neuron.artifact.filesystem import file_sha256
from optimum_neuron.step.spec import GREEDY, SamplingParams, graph_specs
from optimum_neuron.targets.neuron.graphs import hlo
from optimum_neuron.targets.neuron.graphs.io import COPIES, read_graph_io
from optimum_neuron.targets.neuron.lowering.ops import NEURON_OPS
from optimum_neuron.tools.certify import CERTIFICATE_NAME, NOT_CERTIFIED
from optimum_neuron.tools.certify import trial as trials
from optimum_neuron.tools.certify.document import Certificate
from optimum_neuron.tools.certify.recording import record_steps
from optimum_neuron.tools.certify.reference import SamplerCall
from optimum_neuron.tools.certify.verify import Line, verify_certificate
from optimum_neuron.tools.certify.widened import widen_module
from optimum_neuron.tools.check import checks
from optimum_neuron.tools.check.report import CheckError
from optimum_neuron.tools.inspect.collect import collect_facts
from optimum_neuron.tools.inspect.html import render_page


def _verify(folder: Path) -> list[Line]:
    return verify_certificate(Artifact.open(folder), trust_remote_code=False)


def _rewrite(folder: Path, name: str, text: str) -> None:
    """Changes a file, and vouches for it in the manifest."""
    (folder / name).write_text(text)
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    manifest["files"][name] = {"sha256": file_sha256(folder / name), "size": (folder / name).stat().st_size}
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest))


def test_an_export_certifies_what_it_executed(hlo_artifact: Callable[[str], Path]) -> None:
    folder = hlo_artifact("llama")
    certificate = Certificate.read(folder)
    assert CERTIFICATE_NAME in Artifact.open(folder).manifest["files"]
    assert certificate.graphs == {path.stem: file_sha256(path) for path in (folder / "graphs").glob("*.hlo")}
    assert certificate.executed == certificate.graphs
    assert (certificate.layers, certificate.all_layers) == (2, 2)
    assert {"torch", "torch-xla", "transformers", "optimum_neuron"} <= certificate.versions.keys()
    assert all(each.holds and each.count for each in certificate.comparisons)
    assert all(line.holds for line in _verify(folder))


def test_widening_changes_types_alone(sharp_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    sizes = {"dtype": "bfloat16", "mixed_step": False}
    half = export_tiny(sharp_checkpoints["gpt_oss"], tmp_path / "half", target="hlo", **sizes)
    path = next((half / "graphs").glob("chunked_prefill*.hlo"))
    wide, io = widen_module(path.read_bytes(), read_graph_io(path))
    before, after = hlo.parse(path.read_bytes()), hlo.parse(wide)
    pairs = list(zip(hlo.instructions(before), hlo.instructions(after), strict=True))
    assert all(one.opcode == other.opcode and one.name == other.name for (_, one), (_, other) in pairs)
    names = {hlo.dtype_name(instruction.shape) for _, instruction in hlo.instructions(after)}
    assert "bfloat16" in {hlo.dtype_name(each.shape) for _, each in hlo.instructions(before)}
    assert "bfloat16" not in names and {each.dtype for each in io.inputs} <= {"float32", "int32"}


@pytest.mark.full
def test_of_a_large_model_the_first_layers_of_each_kind_are_executed(
    sharp_checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tmp_path / "deep"
    from tiny import TINY_SIZES
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        **TINY_SIZES | {"num_hidden_layers": 5}, use_sliding_window=True, sliding_window=8, max_window_layers=2
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(checkpoint)
    monkeypatch.setattr(trials, "LARGEST_WORK", 1e3)
    folder = export_tiny(checkpoint, tmp_path / "out", target="hlo", certificate=True)
    certificate = Certificate.read(folder)
    # The first layer with a window is the third.
    assert (certificate.layers, certificate.all_layers) == (3, 5)
    assert certificate.executed.keys() == certificate.graphs.keys() and certificate.executed != certificate.graphs
    monkeypatch.undo()
    lines = {line.subject: line for line in _verify(folder)}
    assert all(line.holds for line in lines.values())
    assert lines["modules of the first layers"].found == "the same bytes"


def test_an_export_whose_graphs_compute_something_else_leaves_nothing(
    sharp_checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from optimum_neuron.targets.neuron.lowering import lower_all as rank_model

    ops = dataclasses.replace(NEURON_OPS, output_rows=lambda rows: (rows - 1).clamp(min=0))
    monkeypatch.setattr(rank_model, "NEURON_OPS", ops)
    with pytest.raises(ValueError, match=r"do not compute what the model does: .* in float32 differ by"):
        export_tiny(sharp_checkpoints["llama"], tmp_path / "out", target="hlo", certificate=True, mixed_step=False)
    assert not list(tmp_path.iterdir())


def test_inspect_says_whether_an_artifact_is_certified_and_verify_fails_where_it_is_not(
    hlo_artifact: Callable[[str], Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for name, told in (("llama", "yes"), ("qwen3", NOT_CERTIFIED)):
        _inspect(hlo_artifact(name), verify=False)
        assert re.search(rf"certified +│ {told}", capsys.readouterr().out)
    assert not (hlo_artifact("qwen3") / CERTIFICATE_NAME).exists()
    with pytest.raises(SystemExit) as ended:
        _inspect(hlo_artifact("qwen3"))
    assert ended.value.code == 1 and NOT_CERTIFIED in capsys.readouterr().out


def _inspect(folder: Path, *, verify: bool = True) -> None:
    command = NeuronInspectCommand.__new__(NeuronInspectCommand)
    command.args = Namespace(artifact=folder, verify=verify, trust_remote_code=False, html=None, json=None, bench=None)
    command.run()


def test_verify_prints_what_holds(
    hlo_artifact: Callable[[str], Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    _inspect(hlo_artifact("llama"))
    shown = capsys.readouterr().out
    assert "recorded inputs" in shown and "lint rules passed" in shown and "DIFFERS" not in shown


def test_facts_and_page_have_what_was_certified_counted_and_linted(hlo_artifact: Callable[[str], Path]) -> None:
    facts = collect_facts(Artifact.open(hlo_artifact("llama")))
    certificate = Certificate.read(hlo_artifact("llama"))
    assert facts.certificate is not None and facts.certificate.layers == certificate.layers
    assert [each.difference for each in facts.certificate.comparisons] == [
        each.difference for each in certificate.comparisons
    ]
    steps = {each.name: each for each in facts.graphs if each.kind != "helper"}
    assert steps.keys() | {"copy_slot"} <= certificate.graphs.keys()
    assert all(each.operators["dot"] > 0 and each.cost["flops"] > 0 for each in steps.values())
    helper = next(each for each in facts.graphs if each.name == "copy_slot")
    assert helper.kind == "helper" and helper.operators["parameter"] > 0 and helper.bytes > 0
    assert facts.lint.missing == "" and not [each for each in facts.lint.findings if each["severity"] == "error"]
    page = render_page(facts)
    assert "No rule is broken" in page or "finding" in page
    nearest = sorted(certificate.comparisons, key=lambda each: -each.difference / (each.bound or 1))[:12]
    assert all(each.subject in page and f"{each.count:,}" in page for each in nearest)
    (core,) = facts.memory
    assert core.place == "core 0" and core.capacity is None and core.parts["KV cache"] > 0


def _changed(data: Any, *path: Any, value: Any) -> str:
    place = data
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("version",), 2, "version"),
        (("extra",), 1, "extra"),
        (("graphs",), {"mixed": "0"}, "not of the form"),
        (("executed", "layers"), 0, "layers"),
        (("comparisons", 0, "bound"), 1.0, "times rounding"),
        (("comparisons", 0, "difference"), 1.0, "it certifies that"),
        (("comparisons",), [], "it compares nothing"),
        (("expected", 0, "outputs", 0, "values"), [1.0], "values at"),
        (("scales",), {"kv_cache.key_0": 0.5}, "not a whole number"),
    ],
)
def test_a_certificate_that_no_export_wrote_is_refused_in_a_sentence(
    path: tuple[Any, ...], value: Any, message: str, hlo_artifact: Callable[[str], Path], tmp_path: Path
) -> None:
    document = json.loads((hlo_artifact("llama") / CERTIFICATE_NAME).read_text())
    (tmp_path / CERTIFICATE_NAME).write_text(_changed(document, *path, value=value))
    with pytest.raises(ArtifactError, match=message):
        Certificate.read(tmp_path)


def test_a_tampered_certificate_or_weight_is_refused(hlo_artifact: Callable[[str], Path], tmp_path: Path) -> None:
    for name in (CERTIFICATE_NAME, "weights/model.safetensors"):
        folder = tmp_path / name.partition("/")[0]
        shutil.copytree(hlo_artifact("llama"), folder)
        data = bytearray((folder / name).read_bytes())
        data[len(data) // 2] ^= 1
        (folder / name).write_bytes(data)
        with pytest.raises(ArtifactError, match="was changed after the export"):
            _verify(folder)


def test_verify_tells_numbers_and_graphs_that_differ(hlo_artifact: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "out"
    shutil.copytree(hlo_artifact("llama"), folder)
    document = json.loads((folder / CERTIFICATE_NAME).read_text())
    document["expected"][0]["outputs"][0]["values"][0] += 0.01
    name = next(iter(document["graphs"]))
    document["graphs"][name] = "0" * 64
    document["rules"]["passed"].append("a rule of another version")
    _rewrite(folder, CERTIFICATE_NAME, json.dumps(document))
    wrong = {line.subject for line in _verify(folder) if not line.holds}
    with pytest.raises(CheckError, match=rf"is of other graphs than {name}$"):
        checks._check_certificate(Artifact.open(folder))
    subject = document["expected"][0]["outputs"][0]["subject"]
    assert wrong == {f"{name}: sha256", "lint rules passed", f"{subject} in float32"}


def test_a_graph_that_all_files_vouch_for_is_told_by_its_numbers(
    hlo_artifact: Callable[[str], Path], tmp_path: Path
) -> None:
    """Whoever changes the HLO, what describes it, the certificate's digests and the manifest together."""
    folder = tmp_path / "out"
    shutil.copytree(hlo_artifact("llama"), folder)
    path = next((folder / "graphs").glob("token_generation*.hlo"))
    module = hlo.parse(path.read_bytes())
    norm = next(each for _, each in hlo.instructions(module) if each.opcode == "rsqrt")
    norm.opcode = "logistic"
    path.write_bytes(hlo.serialize(module))
    sha256 = file_sha256(path)
    write(folder, f"graphs/{path.name}", path.read_bytes())
    described = read_json(path.with_suffix(".json")) | {"hlo_sha256": sha256}
    write(folder, f"graphs/{path.stem}.json", json.dumps(described).encode())
    document = read_json(folder / CERTIFICATE_NAME)
    document["graphs"][path.stem] = document["executed"]["graphs"][path.stem] = sha256
    write(folder, CERTIFICATE_NAME, json.dumps(document).encode())
    wrong = {line.subject for line in _verify(folder) if not line.holds}
    assert f"{path.stem}: decode.logits in float32" in wrong
    assert all(" in float32" in subject for subject in wrong)


@pytest.mark.parametrize("change", [{"step": 99}, {"rank": 1}, {"rows": [7]}, {"positions": [10**9]}, {"heads": [9]}])
def test_a_record_of_numbers_that_no_step_makes_is_refused(
    change: dict[str, Any], hlo_artifact: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    shutil.copytree(hlo_artifact("llama"), folder)
    document = json.loads((folder / CERTIFICATE_NAME).read_text())
    state = next(each for each in document["expected"][0]["outputs"] if each["name"] == "kv_cache.key_0")
    state |= {"values": [0.0], "positions": [0]} | change
    _rewrite(folder, CERTIFICATE_NAME, json.dumps(document))
    with pytest.raises(ArtifactError, match="that no step of these graphs makes"):
        _verify(folder)


def test_another_target_has_no_certificate(sharp_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    folder = export_tiny(sharp_checkpoints["llama"], tmp_path / "out", target="eager")
    assert not (folder / CERTIFICATE_NAME).exists()
    with pytest.raises(ValueError, match="holds no HLO"):
        _verify(folder)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_steps_are_such_as_a_runner_makes(rows: int) -> None:
    """Of one slot, columns follow one another; a step's slots are different ones in decode and chunk rows; some rows idle."""
    config = tiny_config(batch_size=4, ctx_batch_size=rows, context_buckets=(32, 64))
    steps = record_steps(graph_specs(config), 300, COPIES, 2)
    assert {step.graph for step in steps} == {spec.name for spec in graph_specs(config)} | set(COPIES)
    for step in steps:
        assert len(set(step.written)) == len(step.written)
        assert all(tensor.min() >= 0 for name, tensor in step.inputs.items() if name.endswith("input_ids"))
        if step.graph.startswith("mixed"):
            chunks = set(step.inputs["chunk.seq_ids"][list(step.rows["chunk"])].tolist())
            assert not chunks & set(step.rows["decode"])
    ends = {column for step in steps for _, column in step.written}
    assert {0, 31, 63} <= ends
    assert any(int(tensor.min()) == -1 for step in steps for name, tensor in step.inputs.items() if "position" in name)


def test_tokens_that_rounding_may_choose_are_accepted_and_no_others() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0 - 1e-6, -3.0]])
    greedy = SamplerCall(logits, (torch.tensor([GREEDY]), torch.tensor([0.0])))
    assert greedy.accepted_tokens(0, 1e-6) == (1, 2) and greedy.accepted_tokens(0, 1e-8) == (1,)
    end = float(logits.softmax(-1)[0, :2].sum())  # of the second token, in their order
    params = torch.tensor([SamplingParams(top_k=4, temperature=1.0)])
    edge = SamplerCall(logits, (params, torch.tensor([end + 1e-6])))
    assert edge.accepted_tokens(0, 1e-6) == (1, 2) and edge.accepted_tokens(0, 1e-9) == (2,)
