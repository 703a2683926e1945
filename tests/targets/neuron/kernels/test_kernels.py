# SPDX-License-Identifier: Apache-2.0
"""Kernels of the SDK behind operators: what a graph computes around them is proven by their references, on any machine."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.tools import NeuronTools
from helpers import artifact_runner, export_tiny, generate, random_tokens, tiny_config
from neuron_fixtures import certificate_of
from torch import Tensor

from optimum_neuron.artifact.artifact import MANIFEST_NAME, Artifact
from optimum_neuron.config import NeuronConfig
from optimum_neuron.targets.neuron.compile import compiler
from optimum_neuron.targets.neuron.compile.compiler import NATIVE_CALL, graph_key, with_native_kernels
from optimum_neuron.targets.neuron.graphs import hlo
from optimum_neuron.targets.neuron.graphs.io import read_graph_io
from optimum_neuron.targets.neuron.kernels import attention
from optimum_neuron.targets.neuron.kernels.kernel import KERNELS as KNOWN
from optimum_neuron.targets.neuron.lint.cost import graph_cost
from optimum_neuron.targets.neuron.lint.lint import lint
from optimum_neuron.targets.neuron.lowering.kernel_calls import called_kernels, kernel_calls, without_references


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


@pytest.mark.parametrize("used", [0, 5, 24])
def test_the_reference_is_attention_over_a_prefix_and_the_tokens_themselves(used: int) -> None:
    torch.manual_seed(0)
    query, own, past = torch.randn(6, 4, 8), torch.randn(2, 2, 4, 8), torch.randn(2, 2, 24, 8)
    past[:, :, used:] = 1e6  # of no effect
    found = attention.chunk_reference(query, *own, *past, torch.tensor([used], dtype=torch.int32))
    visible = torch.cat([torch.arange(24).expand(4, 24) < used, torch.ones(4, 4).tril().bool()], 1)
    keys, values = (torch.cat(each, 1).double().repeat_interleave(3, 0) for each in zip(past, own, strict=True))
    scores = torch.where(visible, query.double() @ keys.transpose(1, 2), -torch.inf)
    expected = torch.softmax(scores, -1) @ values
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


def test_chunk_rows_call_the_kernel_and_layers_share_what_it_stands_for(artifact: Path) -> None:
    module = hlo.parse(graph(artifact, CHUNKS))
    calls = list(kernel_calls(module))
    assert [name for _, name in calls] == ["attention_cte"] * LAYERS * ROWS
    ((reference,),) = {tuple(call.called_computation_ids) for call, _ in calls}
    assert reference in {each.id for each in module.computations}
    assert not called_kernels(graph(artifact, DECODES))
    assert Artifact.open(artifact).config.kernels == KERNELS


def test_graphs_around_a_kernel_are_certified_and_give_the_tokens_of_the_model(
    artifact: Path, sharp_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    assert certificate_of(artifact).comparisons
    eager = artifact_runner(export_tiny(sharp_checkpoints["llama"], tmp_path / "eager"))
    runner, prompt = artifact_runner(artifact), random_tokens(29)
    (tokens, logits), (expected, reference) = (generate(each, prompt, 8) for each in (runner, eager))
    assert tokens == expected
    torch.testing.assert_close(logits, reference, atol=1e-4, rtol=1e-4)


# An operand that is changed, and sizes other than those of graphs that were lowered before.
@pytest.mark.parametrize(
    ("number", "change", "options"),
    [
        (5, lambda start: start - 1, {}),
        pytest.param(0, lambda queries: queries * 1.01, {"output_logits": True}, marks=pytest.mark.full),
    ],
)
def test_a_kernel_that_is_called_wrongly_is_not_certified(
    number: int, change: Callable[[Tensor], Tensor], options: dict[str, Any],
    sharp_checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    call = attention.call_kernel

    def wrong(name: str, operands: list[Tensor]) -> Tensor:
        return call(name, [change(each) if place == number else each for place, each in enumerate(operands)])

    monkeypatch.setattr(attention, "call_kernel", wrong)
    sizes: dict[str, Any] = {"target": "hlo", "kernels": KERNELS, "output_logits": False, "ctx_batch_size": 1}
    sizes |= options
    with pytest.raises(ValueError, match="do not compute what the model does"):
        export_tiny(sharp_checkpoints["llama"], tmp_path / "out", certificate=True, **sizes)
    assert not (tmp_path / "out").exists()


def test_layers_that_a_kernel_does_not_compute_keep_theirs_and_one_without_use_is_refused(
    sharp_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """qwen3 has a layer with a window and one without; gemma2 caps all scores."""
    options: dict[str, Any] = {"target": "hlo", "kernels": KERNELS, "mixed_step": False}
    mixed = export_tiny(sharp_checkpoints["qwen3"], tmp_path / "qwen3", **options)
    assert len(list(kernel_calls(hlo.parse(graph(mixed, CHUNKS))))) == ROWS
    with pytest.raises(ValueError, match="kernels='attention_cte' computes no layer of this model; leave it out"):
        export_tiny(sharp_checkpoints["gemma2"], tmp_path / "gemma2", **options)


def test_the_lint_sees_what_a_compiler_gets(artifact: Path) -> None:
    data, io = graph(artifact, CHUNKS), read_graph_io(artifact / "graphs" / f"{CHUNKS}.hlo")
    assert [each for each in lint(CHUNKS, data, io, "trn2") if each.severity == "error"] == []
    (found, *_) = [each for each in lint(CHUNKS, data, io, "inf2") if each.rule == "custom-call"]
    assert found.severity == "error" and "the kernel attention_cte, which is for trn2 and trn3" in found.problem
    assert len(without_references(hlo.parse(data)).computations) < len(hlo.parse(data).computations)


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


def test_a_native_call_names_its_operands_in_order(artifact: Path, neuron_sdk: Callable[..., NeuronTools]) -> None:
    neuron_sdk("trn2", "nki")
    native = hlo.parse(with_native_kernels(graph(artifact, CHUNKS), "trn2", 1))
    calls = [each for _, each in hlo.instructions(native) if each.opcode == "custom-call"]
    assert {each.custom_call_target for each in calls} == {NATIVE_CALL} and len(calls) == LAYERS * ROWS
    assert not any(each.called_computation_ids for each in calls)
    config = json.loads(base64.b64decode(calls[0].backend_config))
    assert config["klir_binary"]["input_names"] == list(attention.ATTENTION_CTE.operands)
    assert with_native_kernels(graph(artifact, DECODES), "trn2", 1) == graph(artifact, DECODES)


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
