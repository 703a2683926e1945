# SPDX-License-Identifier: Apache-2.0
"""Certificates: written by an export, all or nothing, and read strictly."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from helpers import Artifacts, Cli, export_tiny, tiny_config
from neuron_fixtures import certificate_of
from tampering import read_json, write
from tiny import TINY_SIZES
from transformers import AutoModelForCausalLM, Qwen3Config

from optimum_neuron.artifact.artifact import Artifact, ArtifactError
from optimum_neuron.artifact.filesystem import file_sha256
from optimum_neuron.step.spec import GREEDY, SamplingParams, graph_specs
from optimum_neuron.targets.neuron.graphs.io import COPIES
from optimum_neuron.targets.neuron.lowering import lower_all as rank_model
from optimum_neuron.targets.neuron.lowering.ops import NEURON_OPS
from optimum_neuron.tools.certify import CERTIFICATE_NAME, NOT_CERTIFIED
from optimum_neuron.tools.certify import setup as setups
from optimum_neuron.tools.certify.recording import record_steps
from optimum_neuron.tools.certify.reference import SamplerCall
from optimum_neuron.tools.check import checks
from optimum_neuron.tools.check.step_checks import CheckError
from optimum_neuron.tools.inspect.collect import collect_facts
from optimum_neuron.tools.inspect.html import render_page


@pytest.mark.full
def test_of_a_large_model_the_first_layers_of_each_kind_are_executed(
    sharp_checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, sizes = tmp_path / "deep", TINY_SIZES | {"num_hidden_layers": 5}
    config = Qwen3Config(**sizes, use_sliding_window=True, sliding_window=8, max_window_layers=2)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(checkpoint)
    monkeypatch.setattr(setups, "LARGEST_WORK", 1e3)
    folder = export_tiny(checkpoint, tmp_path / "out", target="hlo", certificate=True)
    certificate = certificate_of(folder)
    # The first layer with a window is the third.
    assert (certificate.layers, certificate.all_layers) == (3, 5)
    subjects = [each.subject for each in certificate.comparisons]
    assert all(any(each.startswith(spec.name) for each in subjects) for spec in graph_specs(tiny_config()))


def test_an_export_whose_graphs_compute_something_else_leaves_nothing(
    sharp_checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = dataclasses.replace(NEURON_OPS, output_rows=lambda rows: (rows - 1).clamp(min=0))
    monkeypatch.setattr(rank_model, "NEURON_OPS", ops)
    with pytest.raises(ValueError, match=r"do not compute what the model does: .* in float32 differ by"):
        export_tiny(sharp_checkpoints["llama"], tmp_path / "out", target="hlo", certificate=True, mixed_step=False)
    assert not list(tmp_path.iterdir())


def test_inspect_says_what_is_certified(hlo_artifact: Artifacts, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for name, told in (("llama", "yes"), ("qwen3", NOT_CERTIFIED)):
        assert re.search(rf"certified +│ {told}", cli("neuron", "inspect", hlo_artifact(name))[1])
    assert not (hlo_artifact("qwen3") / CERTIFICATE_NAME).exists()


def test_an_export_certifies_what_it_executed_and_facts_and_page_have_it(hlo_artifact: Artifacts) -> None:
    facts = collect_facts(Artifact.open(hlo_artifact("llama")))
    folder = hlo_artifact("llama")
    certificate = certificate_of(folder)
    assert facts.certificate == certificate and (certificate.layers, certificate.all_layers) == (2, 2)
    assert certificate.graphs == {path.stem: file_sha256(path) for path in (folder / "graphs").glob("*.hlo")}
    versions = read_json(folder / CERTIFICATE_NAME)["versions"]
    assert {"torch", "torch-xla", "transformers", "optimum_neuron"} <= versions.keys()
    assert all(each.difference <= each.bound and each.count for each in certificate.comparisons)
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


def test_a_certificate_that_no_export_wrote_is_refused_in_a_sentence(hlo_artifact: Artifacts, tmp_path: Path) -> None:
    folder = shutil.copytree(hlo_artifact("llama"), tmp_path / "out")
    sound = read_json(folder / CERTIFICATE_NAME)
    layers = sound["executed"] | {"layers": 0}
    negative = [sound["comparisons"][0] | {"bound": -1.0}]
    wrong = {
        "of the form": {"graphs": {"mixed": "0"}},
        "layers": {"executed": layers},
        "bound": {"comparisons": negative},
        "rules": {"rules": []},
    }
    for message, changes in wrong.items():
        write(folder, CERTIFICATE_NAME, json.dumps(sound | changes).encode())
        with pytest.raises(ArtifactError, match=message):
            certificate_of(folder)


def test_a_certificate_that_was_changed_or_of_other_graphs_is_refused(hlo_artifact: Artifacts, tmp_path: Path) -> None:
    folder = shutil.copytree(hlo_artifact("llama"), tmp_path / "out")
    name, digest = next(iter(read_json(folder / CERTIFICATE_NAME)["graphs"].items()))
    data = (folder / CERTIFICATE_NAME).read_bytes().replace(digest.encode(), b"0" * 64)
    (folder / CERTIFICATE_NAME).write_bytes(data)
    for read in (collect_facts, checks._check_certificate):
        with pytest.raises(ArtifactError, match="was changed after the export"):
            read(Artifact.open(folder))
    write(folder, CERTIFICATE_NAME, data)
    with pytest.raises(CheckError, match=rf"certifies other graphs than {name}$"):
        checks._check_certificate(Artifact.open(folder))


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
