# SPDX-License-Identifier: Apache-2.0
"""Activations of int8: layers of int8 and int4 codes multiply with rounded ones, all others with plain ones, and nobody does so unasked."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import tampering
import torch
from gguf_files import write_gguf
from helpers import artifact_runner, export_tiny, prefill_pieces, random_tokens
from moe import make_checkpoint
from quantized import ROUNDINGS, quantize_experts, quantize_mixed
from quantized_files import check_export_refused, dequantized_model, quantize_to_fp8
from torch import Tensor, nn

from optimum_neuron import NeuronModelForCausalLM
from optimum_neuron.artifact.artifact import MANIFEST_NAME, Artifact, ArtifactError
from optimum_neuron.artifact.quantization import QUANTIZATION_NAME
from optimum_neuron.export import recipe as export
from optimum_neuron.hub.card import make_card
from optimum_neuron.kernels.host.instruction_sets import choose_instruction_set
from optimum_neuron.step.features.codes.modules import reference_product
from optimum_neuron.step.features.codes.weight import QuantizedWeight
from optimum_neuron.step.features.experts.experts import dequantized_experts
from optimum_neuron.targets import cpu
from optimum_neuron.tools.inspect.collect import collect_facts
from optimum_neuron.tools.inspect.html import render_page


TARGETS = ("eager", "cpu")
ROUNDED = {"activations": "int8"}


@pytest.fixture(scope="module")
def mixed(sharp_checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def make(target: str) -> Path:
        output = tmp_path_factory.mktemp("rounded") / "artifact"
        return _export_as(quantize_mixed, sharp_checkpoints["llama"], output, target=target)

    return make


def _export_as(quantize: Callable[..., None], checkpoint: Path, output: Path, **options: Any) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "quantize", quantize)
        return export_tiny(checkpoint, output, quantization="int8", **ROUNDED, **options)


def _forms(artifact: Path) -> Mapping[str, dict[str, Any]]:
    forms: Mapping[str, dict[str, Any]] = json.loads((artifact / QUANTIZATION_NAME).read_text())["weights"]
    return forms


def _hook(groups: int, module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    """What the codes of a layer's activations stand for, in place of them."""
    blocks = [block for group in args[0].unflatten(-1, (groups, -1)).unbind(-2) for block in group.split(64, -1)]
    scales = [block.abs().amax(-1, keepdim=True) / 127 for block in blocks]
    rounded = [(block * (1 / scale)).round() * scale for block, scale in zip(blocks, scales, strict=True)]
    return (torch.cat(rounded, -1),)


def _check(artifact: Path) -> None:
    """That steps compute what transformers does with the dequantized weights, where linear layers of such codes get rounded inputs."""
    ids = random_tokens(21, 1)
    peer, _ = dequantized_model(artifact)
    with torch.no_grad():
        plain = peer(torch.from_numpy(ids)[None].long()).logits[0, -1]
        for name, form in _forms(artifact).items():
            linear, meets = peer.get_submodule(name), form["kind"] in ("int8", "int4")
            assert form.get("activations") == ("int8" if meets and isinstance(linear, nn.Linear) else None), name
            if "activations" in form:
                linear.register_forward_pre_hook(partial(_hook, form["groups"]))
        expected = peer(torch.from_numpy(ids)[None].long()).logits[0, -1]
    logits = prefill_pieces(artifact_runner(artifact), 0, ids, [8, 8, 5])
    spread = expected.amax() - expected.amin()
    # Of activations that differ in a last bit, a code can be another one, which is a hundredth of what rounding all of them does.
    assert (logits - expected).abs().amax() < 3e-4 * spread
    assert (plain - expected).abs().amax() > 1e-3 * spread


@pytest.mark.parametrize("target", TARGETS)
def test_logits_are_those_of_rounded_activations_to_the_bit_at_any_cut(
    target: str, mixed: Callable[[str], Path]
) -> None:
    _check(mixed(target))
    runner, prompt = artifact_runner(mixed(target)), random_tokens(21, 1)
    expected = prefill_pieces(runner, 0, prompt, [8, 8, 5])
    assert torch.equal(prefill_pieces(runner, 1, prompt, [1, 2, 8, 7, 3]), expected)
    assert torch.equal(prefill_pieces(runner, 2, prompt, [5, 8, 8]), expected)


def test_experts_multiply_with_rounded_activations_on_both_targets(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("qwen3_moe", tmp_path / "checkpoint")
    prompt, logits = random_tokens(13), {}
    for target in TARGETS:
        artifact = _export_as(quantize_experts, checkpoint, tmp_path / target, target=target)
        assert {form["activations"] for form in _forms(artifact).values()} == {"int8"}
        logits[target] = prefill_pieces(artifact_runner(artifact), 0, prompt, [8, 5])
    spread = logits["eager"].amax() - logits["eager"].amin()
    assert (logits["eager"] - logits["cpu"]).abs().amax() < 3e-4 * spread
    with torch.no_grad():
        plain = dequantized_model(artifact)[0](torch.from_numpy(prompt)[None].long()).logits[0, -1]
    assert (logits["eager"] - plain).abs().amax() > 1e-3 * spread


def test_all_experts_together_compute_what_each_does() -> None:
    weight = ROUNDINGS["int4 with a zero point"](torch.randn(3, 24, 160))
    weight = QuantizedWeight(weight.kind, weight.codes, weight.scale, weight.shift, "int8")
    x = torch.randn(3, 5, 160)
    together = dequantized_experts(x, weight)
    for expert in range(3):
        assert torch.equal(together[expert], reference_product(x[expert], weight.select_part(expert), None))


@pytest.mark.parametrize("stored", ["Q8_0", "Q4_0"])
def test_codes_of_a_checkpoint_meet_rounded_activations(stored: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    write_gguf(tiny_checkpoint, tmp_path / "tiny.gguf", stored)
    artifact = export_tiny(tmp_path / "tiny.gguf", tmp_path / "out", **ROUNDED)
    _check(artifact)
    opened = Artifact.open(artifact)
    assert (opened.config.quantization, opened.config.activations) == ("checkpoint", "int8")
    # Of an earlier reader that would multiply with plain activations.
    assert opened.manifest["format_version"] == 6


def test_inspect_and_the_card_tell_which_weights_meet_rounded_activations(mixed: Callable[[str], Path]) -> None:
    facts = collect_facts(Artifact.open(mixed("eager")))
    assert {(each.kind, each.activations) for each in facts.quantized} == {
        ("int8", "int8"), ("int4", "int8"), ("fp8", None), ("fp4", None)
    }  # fmt: skip
    assert "--activations int8" in facts.command
    card, page = make_card(facts), render_page(facts)
    told = "are rounded to int8, each token's by blocks of 64 inputs"
    assert "- int8-activations\n" in card and told in card and told in page.replace("&#39;", "'")
    assert "| fp8 | 3 | 1 | float32 | no | float32 |" in card and "| int8 | 5 | 1 | float32 | no | int8 |" in card


@pytest.mark.parametrize(
    ("kind", "target", "faster", "asked", "rounded"),
    [
        ("int8", "cpu", True, "auto", "int8"), ("int8", "cpu", True, "none", None), ("int8", "cpu", False, "auto", None),
        ("int8", "eager", True, "auto", None), ("fp8", "cpu", True, "auto", None), (None, "cpu", True, "auto", None),
    ],
)  # fmt: skip
def test_by_default_the_cpu_target_rounds_activations_where_that_is_faster(
    kind: str | None, target: str, faster: bool, asked: str, rounded: str | None, tiny_checkpoint: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    chosen = replace(choose_instruction_set(), rounded_is_faster=faster)
    monkeypatch.setattr(cpu, "choose_instruction_set", lambda: chosen)
    with caplog.at_level(logging.WARNING):
        folder = export_tiny(tiny_checkpoint, tmp_path / "out", target=target, quantization=kind, activations=asked)
    artifact = Artifact.open(folder)
    assert artifact.config.activations == rounded
    if kind != "int8":
        return
    assert {form.get("activations") for form in _forms(folder).values()} == {rounded}
    assert ["') keeps them" in caplog.text, "leave out" in caplog.text] == [rounded is not None, asked == "none"]
    command = collect_facts(artifact).command
    assert ("--activations none" in command) == (target == "cpu" and rounded is None)
    assert ("--activations int8" in command) == (rounded is not None)


def test_a_manifest_whose_activations_are_left_open_is_refused(mixed: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(mixed("eager"), tmp_path / "artifact"))
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    manifest["config"]["activations"] = "auto"
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match=r"activations='auto', where .* a choice belong"):
        Artifact.open(folder)


def test_layers_of_other_codes_are_counted(
    sharp_checkpoints: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        _export_as(quantize_mixed, sharp_checkpoints["llama"], tmp_path / "out")
    assert "4 of 15 quantized weights are fp4 and fp8, which activations of int8 do not meet: they multiply with plain ones" in caplog.text  # fmt: skip


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"activations": "int4", "quantization": "int8"}, "activations='int4' is not known; choose one of auto, none, int8"),
        ({"activations": "int8"}, "is exported with plain ones; give --quantization int8"),
        ({"activations": "int8", "quantization": "fp8"}, "quantization='fp8' makes none; use quantization='int8' or 'int4'"),
        ({"activations": "int8", "quantization": "int8", "target": "trn2"}, "target='trn2' has no product of whole numbers"),
    ],
)  # fmt: skip
def test_what_cannot_round_activations_is_refused_before_anything_is_written(
    options: dict[str, Any], told: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    check_export_refused(told, tiny_checkpoint, tmp_path / "out", **options)


def test_a_checkpoint_whose_codes_meet_none_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(tiny_checkpoint, tmp_path / "fp8"))
    quantize_to_fp8(checkpoint)
    kept = "meet weights that are codes of int8 or int4, and LlamaForCausalLM has fp8; leave it out"
    check_export_refused(kept, checkpoint, tmp_path / "out", **ROUNDED)
    words = "is exported with plain ones; give --quantization int8"
    check_export_refused(words, checkpoint, tmp_path / "out", dequantize=True, **ROUNDED)


@pytest.mark.parametrize(
    ("kind", "activations", "told"),
    [
        ("int8", "int4", "cannot be read"),
        ("fp8", "int8", "does not fit config.json: activations of int8 do not meet codes of fp8"),
    ],
)
def test_a_changed_description_is_told(
    kind: str, activations: str, told: str, mixed: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(mixed("eager"), tmp_path / "artifact"))
    document = {"weights": dict(_forms(folder))}
    form = next(form for form in document["weights"].values() if form["kind"] == kind)
    form["activations"] = activations
    tampering.write(folder, QUANTIZATION_NAME, json.dumps(document).encode())
    with pytest.raises(ValueError, match=told):
        NeuronModelForCausalLM.from_pretrained(folder)
