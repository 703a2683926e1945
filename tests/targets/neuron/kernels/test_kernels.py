# SPDX-License-Identifier: Apache-2.0
"""Kernels of the SDK as operators: graphs around them are proven by their references, on any machine, and NKI gets what it compiles."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import moe
import pytest
import torch
from fakes.tools import NeuronTools
from helpers import artifact_runner, export_tiny, generate, random_tokens, tiny_config
from neuron_fixtures import certificate_of
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from optimum_neuron.artifact.artifact import MANIFEST_NAME, Artifact
from optimum_neuron.config import NeuronConfig
from optimum_neuron.step.features.experts.experts import ExpertsCall
from optimum_neuron.targets.neuron.compile import compiler
from optimum_neuron.targets.neuron.compile.compiler import NATIVE_CALL, graph_key, with_native_kernels
from optimum_neuron.targets.neuron.graphs import hlo
from optimum_neuron.targets.neuron.graphs.io import read_graph_io
from optimum_neuron.targets.neuron.kernels import attention
from optimum_neuron.targets.neuron.kernels.kernel import KERNELS as KNOWN
from optimum_neuron.targets.neuron.kernels.moe_tkg import compute_chosen
from optimum_neuron.targets.neuron.lint.cost import graph_cost
from optimum_neuron.targets.neuron.lint.lint import lint
from optimum_neuron.targets.neuron.lowering.kernel_calls import called_kernels, kernel_calls, without_references
from optimum_neuron.targets.neuron.operators.expert_forms import all_experts, gather
from optimum_neuron.targets.neuron.operators.experts import expert_layer, in_form
from optimum_neuron.targets.neuron.sdk.hardware import chip_of


pytest_plugins = ("fakes.plugin",)
KERNELS = ("attention_cte",)
CHUNKS, DECODES = "chunked_prefill_chunk8_context64", "token_generation_context64"
LAYERS, ROWS = 2, 2


@pytest.fixture(scope="module")
def artifact(sharp_checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certified by its export; not to be changed."""
    folder = tmp_path_factory.mktemp("kernels") / "out"
    return export_tiny(sharp_checkpoints["llama"], folder, target="hlo", kernels=KERNELS, certificate=True)


def graph(artifact: Path, name: str) -> bytes:
    return (artifact / "graphs" / f"{name}.hlo").read_bytes()


def test_graphs_around_a_kernel_are_certified_and_give_the_tokens_of_the_model(
    artifact: Path, sharp_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    assert certificate_of(artifact).comparisons
    eager = artifact_runner(export_tiny(sharp_checkpoints["llama"], tmp_path / "eager"))
    runner, prompt = artifact_runner(artifact), random_tokens(29)
    (tokens, logits), (expected, reference) = (generate(each, prompt, 8) for each in (runner, eager))
    assert tokens == expected
    torch.testing.assert_close(logits, reference, atol=1e-4, rtol=1e-4)


def test_layers_that_a_kernel_does_not_compute_keep_theirs_and_one_without_use_is_refused(
    sharp_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """qwen3 has a layer with a window and one without; gemma2 caps all scores."""
    options: dict[str, Any] = {"target": "hlo", "kernels": KERNELS, "mixed_step": False}
    mixed = export_tiny(sharp_checkpoints["qwen3"], tmp_path / "qwen3", **options)
    assert len(list(kernel_calls(hlo.parse(graph(mixed, CHUNKS))))) == ROWS
    with pytest.raises(ValueError, match="kernels='attention_cte' computes no layer of this model; leave it out"):
        export_tiny(sharp_checkpoints["gemma2"], tmp_path / "gemma2", **options)


def test_chunk_rows_call_the_kernel_and_the_lint_sees_what_a_compiler_gets(artifact: Path) -> None:
    data, io = graph(artifact, CHUNKS), read_graph_io(artifact / "graphs" / f"{CHUNKS}.hlo")
    module = hlo.parse(data)
    calls = list(kernel_calls(module))
    assert [name for _, name in calls] == ["attention_cte"] * LAYERS * ROWS
    # Layers share what the calls stand for, which no compiler gets.
    ((reference,),) = {tuple(call.called_computation_ids) for call, _ in calls}
    assert reference in {each.id for each in module.computations}
    assert len(without_references(hlo.parse(data)).computations) < len(module.computations)
    assert not called_kernels(graph(artifact, DECODES))
    assert Artifact.open(artifact).config.kernels == KERNELS
    assert [each for each in lint(CHUNKS, data, io, "trn2") if each.severity == "error"] == []
    (found, *_) = [each for each in lint(CHUNKS, data, io, "inf2") if each.rule == "custom-call"]
    assert found.severity == "error" and "the kernel attention_cte, which is for trn2 and trn3" in found.problem


def test_what_a_kernel_stands_for_is_counted(artifact: Path, hlo_artifact: Callable[[str], Path]) -> None:
    costs = [
        graph_cost(CHUNKS, graph(each, CHUNKS), read_graph_io(each / "graphs" / f"{CHUNKS}.hlo"), "trn2")
        for each in (hlo_artifact("llama"), artifact)
    ]
    # Both products over the tokens' own keys, beside all columns.
    heads, dim, tokens = 4, 16, 8
    assert (costs[0].kernels, costs[1].kernels) == ({}, {"attention_cte": LAYERS * ROWS})
    assert costs[1].total_flops - costs[0].total_flops == LAYERS * ROWS * 2 * 2 * heads * dim * tokens * tokens


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.full), 2])
def test_the_compiler_gets_what_nki_made(
    ranks: int, neuron_sdk: Callable[..., NeuronTools], sharp_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    neuron_sdk("trn2", "nki")
    options: dict[str, Any] = {"target": "trn2", "kernels": KERNELS, "mixed_step": False, "certificate": ranks == 2}
    path = export_tiny(sharp_checkpoints["llama"], tmp_path / "out", tensor_parallel_size=ranks, **options)
    assert called_kernels(graph(path, CHUNKS)) == {"attention_cte"}
    neff = (path / "graphs" / f"{CHUNKS}.neff").read_bytes()
    assert NATIVE_CALL.encode() in neff and b"optimum_neuron.kernel" not in neff
    native = hlo.parse(with_native_kernels(graph(path, CHUNKS), "trn2", 2))
    calls = [each for _, each in hlo.instructions(native) if each.opcode == "custom-call"]
    assert [each.custom_call_target for each in calls].count(NATIVE_CALL) == LAYERS * ROWS
    assert not any(each.called_computation_ids for each in calls)
    call = next(each for each in calls if each.custom_call_target == NATIVE_CALL)
    config = json.loads(base64.b64decode(call.backend_config))
    assert config["klir_binary"]["input_names"] == list(attention.ATTENTION_CTE.operands)  # in order
    assert with_native_kernels(graph(path, DECODES), "trn2", 2) == graph(path, DECODES)
    compiled = json.loads((tmp_path / "attention_cte.json").read_text())
    assert compiled["q"] == ["float32", [4 // ranks, 8, 16]]
    assert compiled["k_prior"] == ["float32", [2 // ranks, 64, 16]]
    assert compiled["prior_used_len"] == ["int32", [1]] and (compiled["target"], compiled["lnc"]) == ("trn2", 2)
    versions = json.loads((path / MANIFEST_NAME).read_text())["target_data"]["versions"]
    assert versions["nki"] == "0.3.0" and versions["nki-library"] == "0.9.0"


def test_what_nki_is_given_is_in_the_key_of_a_graph_and_what_runs_in_its_place_is_not(
    artifact: Path, neuron_sdk: Callable[..., NeuronTools], monkeypatch: pytest.MonkeyPatch
) -> None:
    neuron_sdk("trn2", "nki")

    def key(name: str = CHUNKS, data: bytes | None = None) -> str:
        return graph_key(data or graph(artifact, name), "trn2", ("-O1", "--lnc=2"), "2.27")

    before, decodes = key(), key(DECODES)
    module = hlo.parse(graph(artifact, CHUNKS))
    (reference,) = {each for call, _ in kernel_calls(module) for each in call.called_computation_ids}
    computation = next(each for each in module.computations if each.id == reference)
    computation.name = "another"
    assert key(data=hlo.serialize(module)) == before
    called = KNOWN["attention_cte"]
    monkeypatch.setitem(KNOWN, "attention_cte", replace(called, arguments={**called.arguments, "tile": 2}))
    others = {before, key()}
    monkeypatch.setitem(KNOWN, "attention_cte", replace(called, module="another"))
    others.add(key())
    monkeypatch.setitem(KNOWN, "attention_cte", called)
    monkeypatch.setattr(compiler, "installed_version", lambda distribution: "9.9")
    assert len(others | {key()}) == 4
    assert key(DECODES) == decodes, "a graph without kernels"


def test_a_kernel_that_nki_refuses_is_told(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise TypeError("no such instruction\nat line 3")

    monkeypatch.setattr(compiler, "_build_config", refuse)
    told = r"NKI does not compile attention_cte for q float32\[4, 8, 16\], .* \(no such"
    with pytest.raises(RuntimeError, match=told):
        with_native_kernels(graph(artifact, CHUNKS), "trn2", 1)


@pytest.mark.parametrize(
    ("packages", "problem"), [((), "nki is not installed"), (("placeholder",), "the installed nki is a placeholder")]
)
def test_kernels_that_the_sdk_lacks_are_refused_before_anything_is_written(
    packages: tuple[str, ...],
    problem: str,
    neuron_sdk: Callable[..., NeuronTools],
    tiny_checkpoint: Path,
    tmp_path: Path,
) -> None:
    neuron_sdk("trn2", *packages)
    told = f"attention_cte comes from the Neuron SDK: {problem}.* or leave --kernels out"
    with pytest.raises(RuntimeError, match=told):
        export_tiny(tiny_checkpoint, tmp_path / "out", target="trn2", kernels=KERNELS)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "kind", "told"),
    [
        ({"kernels": ("flash",)}, ValueError, "kernels='flash' is not known; choose one of attention_cte"),
        ({"kernels": "attention_cte"}, TypeError, "kernels must be a list of names, not 'attention_cte'"),
        ({"kernels": KERNELS * 2}, ValueError, "names one twice"),
        ({"kernels": KERNELS, "target": "inf2"}, ValueError, "target='inf2' has none; leave kernels out"),
        ({"kernels": KERNELS, "target": "cpu"}, ValueError, "target='cpu' has none; leave kernels out"),
    ],
)
def test_a_config_refuses_kernels_that_no_graph_could_call(
    options: dict[str, Any], kind: type[Exception], told: str
) -> None:
    with pytest.raises(kind, match=told):
        NeuronConfig(**options)
    config = tiny_config(target="trn3", kernels=["attention_cte"])
    assert NeuronConfig.from_dict(config.to_dict()) == config


EXPERTS: dict[str, Any] = {
    "kernels": ("moe_tkg",), "batch_size": 1, "ctx_batch_size": 1, "dtype": "bfloat16", "mixed_step": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def moe_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As wide as a tile on each of two cores."""
    config: Any = moe.CONFIGS["qwen3_moe"]()
    config.hidden_size = 256
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(moe.CONFIGS, "wide", lambda: config)
        return moe.make_checkpoint("wide", tmp_path_factory.mktemp("moe"))


def test_tokens_get_by_the_kernel_what_their_experts_compute(moe_checkpoint: Path) -> None:
    """The second token goes nowhere."""
    torch.manual_seed(0)
    config = type(moe.CONFIGS["qwen3_moe"]()).from_pretrained(moe_checkpoint)
    layer = Qwen3MoeExperts(config).requires_grad_(False)
    for parameter in layer.parameters():
        parameter.normal_(std=parameter.shape[-1] ** -0.5)
    index = torch.tensor([[0, 1, 7], [8, 8, 8], [5, 2, 0], [7, 3, 4]])
    hidden = torch.randn(4, 256, dtype=torch.bfloat16)
    call = ExpertsCall(layer.to(torch.bfloat16), hidden, index, torch.rand(4, 3))
    form = gather(expert_layer(call), 4, chip_of("trn2"))
    without = torch.zeros(1)
    compute = compute_chosen(lambda *_: without)
    found = compute(call, form)
    assert not found[1].any()
    torch.testing.assert_close(found, in_form(call, form), atol=2e-2, rtol=2e-2)
    assert compute(call, all_experts(4)) is without


@pytest.mark.parametrize(
    ("tokens", "hidden", "changed", "by_kernel"),
    [
        (128, 256, {}, True),
        (129, 256, {}, False),
        (4, 128, {}, False),  # no whole tile on each of two cores
        (4, 256, {"act_fn": torch.nn.GELU()}, False),
        (4, 256, {"has_bias": True}, False),
        (4, 256, {"has_gate": False}, False),
        (4, 256, {"is_concatenated": False}, False),
        (4, 256, {"has_post_expert_norm": True}, False),
        (4, 256, {"_apply_gate": lambda self, x: x}, False),
        (4, 256, {"dtype": torch.float32}, False),
    ],
)
def test_experts_that_the_kernel_does_not_compute_are_not_its(
    tokens: int, hidden: int, changed: dict[str, Any], by_kernel: bool
) -> None:
    config = moe.CONFIGS["qwen3_moe"]()
    config.hidden_size = hidden
    kind = type("Experts", (Qwen3MoeExperts,), {})
    dtype = changed.get("dtype", torch.bfloat16)
    layer, x = kind(config).requires_grad_(False).to(dtype), torch.zeros(tokens, hidden, dtype=dtype)
    call = ExpertsCall(layer, x, torch.zeros(tokens, 3, dtype=torch.int64), torch.ones(tokens, 3))
    form = gather(expert_layer(call), tokens, chip_of("trn2"))
    for name, value in changed.items():
        setattr(kind if name in ("_apply_gate", "dtype") else layer, name, value)
    without = torch.zeros(1)
    assert (compute_chosen(lambda *_: without)(call, form) is not without) == by_kernel


def test_experts_around_the_kernel_are_certified(moe_checkpoint: Path, tmp_path: Path) -> None:
    artifact = export_tiny(moe_checkpoint, tmp_path / "out", target="hlo", certificate=True, **EXPERTS)
    assert certificate_of(artifact).comparisons
    data, io = graph(artifact, DECODES), read_graph_io(artifact / "graphs" / f"{DECODES}.hlo")
    assert [each for _, each in kernel_calls(hlo.parse(data))] == ["moe_tkg"] * LAYERS
    assert not called_kernels(graph(artifact, CHUNKS))
    assert not [each for each in lint(DECODES, data, io, "trn2") if each.severity == "error"]
    # Weights lie as the kernel takes them.
    assert {each.shape for each in io.inputs if "experts" in each.name} == {(8, 256, 80), (8, 40, 256)}


def test_nki_is_given_it_as_the_library_declares_it(
    neuron_sdk: Callable[..., NeuronTools], moe_checkpoint: Path, tmp_path: Path
) -> None:
    neuron_sdk("trn2", "nki")
    path = export_tiny(moe_checkpoint, tmp_path / "out", target="trn2", **EXPERTS)
    assert called_kernels(graph(path, DECODES)) == {"moe_tkg"}
    compiled = json.loads((tmp_path / "moe_tkg.json").read_text())
    assert set(compiled) == {*KNOWN["moe_tkg"].operands, "target", "lnc"}
    assert compiled["expert_gate_up_weights"] == ["bfloat16", [8, 256, 2, 40]]
    assert Artifact.open(path).config.kernels == ("moe_tkg",)
