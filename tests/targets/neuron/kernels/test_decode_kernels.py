# SPDX-License-Identifier: Apache-2.0
"""Kernels of decode steps, attention and experts: their references, the graphs around them, and what NKI is given."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import moe
import pytest
import torch
from fakes.tools import NeuronTools
from helpers import artifact_runner, export_tiny, generate, random_tokens
from neuron_fixtures import certificate_of
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from optimum_neuron.artifact.artifact import Artifact
from optimum_neuron.step.attention.rows import AttentionCall, AttentionRows, OwnedBlocks
from optimum_neuron.step.features.experts.experts import ExpertsCall
from optimum_neuron.targets.neuron.graphs import hlo
from optimum_neuron.targets.neuron.graphs.io import read_graph_io
from optimum_neuron.targets.neuron.kernels.attention import attend_decodes
from optimum_neuron.targets.neuron.kernels.moe_tkg import compute_chosen
from optimum_neuron.targets.neuron.kernels.registry import KERNELS
from optimum_neuron.targets.neuron.lint.lint import Finding, lint
from optimum_neuron.targets.neuron.lowering.kernel_calls import called_kernels, kernel_calls
from optimum_neuron.targets.neuron.operators import attention
from optimum_neuron.targets.neuron.operators.expert_forms import all_experts, gather
from optimum_neuron.targets.neuron.operators.experts import expert_layer, in_form
from optimum_neuron.targets.neuron.sdk.hardware import chip_of


pytest_plugins = ("fakes.plugin",)
DECODES, CHUNKS = "token_generation_context128", "chunked_prefill_chunk8_context128"
# Whole tiles of columns.
SIZES: dict[str, Any] = {"sequence_length": 128, "context_buckets": (128,)}
ATTENTION = {**SIZES, "kernels": ("attention_block_tkg",), "mixed_step": False}
EXPERTS = {**SIZES, "kernels": ("moe_tkg",), "batch_size": 1, "ctx_batch_size": 1, "dtype": "bfloat16"}
LAYERS, KV_HEADS = 2, 2
BLOCKS = torch.tensor([4, 0], dtype=torch.int32)


@pytest.fixture(scope="module")
def moe_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As wide as a tile on each of two cores."""
    config: Any = moe.CONFIGS["qwen3_moe"]()
    config.hidden_size = 256
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(moe.CONFIGS, "wide", lambda: config)
        return moe.make_checkpoint("wide", tmp_path_factory.mktemp("moe"))


def graph(artifact: Path, name: str) -> bytes:
    return (artifact / "graphs" / f"{name}.hlo").read_bytes()


def calls_of(artifact: Path, name: str) -> list[str]:
    return [each for _, each in kernel_calls(hlo.parse(graph(artifact, name)))]


def errors_of(artifact: Path, name: str) -> list[Finding]:
    io = read_graph_io(artifact / "graphs" / f"{name}.hlo")
    return [each for each in lint(name, graph(artifact, name), io, "trn2") if each.severity == "error"]


def attention_call(
    query: Tensor, key: Tensor, value: Tensor, window: int | None = None, softcap: Any = None, sinks: Any = None
) -> AttentionCall:
    return AttentionCall(0, query, key, value, scaling=0.3, sliding_window=window, softcap=softcap, sinks=sinks)


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("window", [None, 5])
def test_decode_rows_get_by_the_kernel_what_they_get_without_it(broken: bool, window: int | None) -> None:
    """Rows at the start, within, at the end and idle; what is stale is anything."""
    torch.manual_seed(0)
    keys, values = torch.randn(5, 2, 256, 16), torch.randn(5, 2, 256, 16)
    positions = torch.tensor([[0], [100], [255], [-1]], dtype=torch.int32)
    if broken:
        for row, position in enumerate(positions.flatten().tolist()):
            for each in (keys, values):
                each[row, :, max(position, 0) :] = torch.nan
    query, key, value = torch.randn(4, 6, 1, 16), torch.randn(4, 2, 16), torch.randn(4, 2, 16)
    call, rows = attention_call(query, key, value, window), AttentionRows(positions, None, 256)
    wanted = attention.attend_decode(call, rows, query, keys, values, key, value)

    def none(*_: object) -> Tensor:
        raise AssertionError("the kernel does not compute this")

    found = attend_decodes(none)(call, rows, query, keys, values, key, value)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)
    assert found.isfinite().all()


@pytest.mark.parametrize(
    ("changed", "by_kernel"),
    [
        ({}, True),
        ({"columns": 128}, True),
        ({"columns": 192}, False),  # no whole tile on each of two cores
        ({"dim": 128, "value_dim": 128}, True),
        ({"dim": 130, "value_dim": 130}, False),
        ({"dim": 15, "value_dim": 15}, False),
        ({"value_dim": 8}, False),
        ({"heads": 128}, True),  # of both rows 128 per key head
        ({"heads": 130}, False),
        ({"softcap": 30.0}, False),
        ({"sinks": torch.zeros(6)}, False),
        # It reads row i of a cache, where row i of a step need not be.
        ({"numbers": BLOCKS}, False),
        ({"owned": True}, False),
    ],
)
def test_attention_that_the_kernel_does_not_compute_is_not_its(changed: dict[str, Any], by_kernel: bool) -> None:
    sizes = {"columns": 256, "dim": 16, "value_dim": 16, "heads": 6, "numbers": None, "owned": False} | changed
    keys, values = (torch.randn(5, 2, sizes["columns"], sizes[each]) for each in ("dim", "value_dim"))
    query, key, value = torch.randn(2, sizes["heads"], 1, sizes["dim"]), keys[:2, :, 0], values[:2, :, 0]
    call = attention_call(query, key, value, softcap=changed.get("softcap"), sinks=changed.get("sinks"))
    positions = torch.tensor([[3], [100]], dtype=torch.int32)
    owned = OwnedBlocks(positions, BLOCKS, BLOCKS, BLOCKS[:, None]) if sizes["owned"] else None
    rows, without = AttentionRows(positions, sizes["numbers"], sizes["columns"], owned=owned), torch.zeros(1)
    found = attend_decodes(lambda *_: without)(call, rows, query, keys, values, key, value)
    assert (found is not without) == by_kernel


def test_decode_attention_around_the_kernel_is_certified_and_gives_the_tokens_of_the_model(
    sharp_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    artifact = export_tiny(sharp_checkpoints["llama"], tmp_path / "out", target="hlo", certificate=True, **ATTENTION)
    assert calls_of(artifact, DECODES) == ["attention_block_tkg"] * LAYERS * KV_HEADS
    assert not called_kernels(graph(artifact, CHUNKS))
    assert errors_of(artifact, DECODES) == []
    eager = artifact_runner(export_tiny(sharp_checkpoints["llama"], tmp_path / "eager", **SIZES))
    runner, prompt = artifact_runner(artifact), random_tokens(29)
    (tokens, logits), (expected, reference) = (generate(each, prompt, 8) for each in (runner, eager))
    assert tokens == expected
    torch.testing.assert_close(logits, reference, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tokens_get_by_the_kernel_what_their_experts_compute(dtype: torch.dtype, moe_checkpoint: Path) -> None:
    """The second token goes nowhere."""
    torch.manual_seed(0)
    config = type(moe.CONFIGS["qwen3_moe"]()).from_pretrained(moe_checkpoint)
    layer = Qwen3MoeExperts(config).requires_grad_(False)
    for parameter in layer.parameters():
        parameter.normal_(std=parameter.shape[-1] ** -0.5)
    index = torch.tensor([[0, 1, 7], [8, 8, 8], [5, 2, 0], [7, 3, 4]])
    call = ExpertsCall(layer.to(dtype), torch.randn(4, 256, dtype=dtype), index, torch.rand(4, 3))
    form = gather(expert_layer(call), 4, chip_of("trn2"))
    called: list[object] = []

    def without(call: ExpertsCall, form: object) -> Tensor:
        called.append(form)
        return torch.zeros(1)

    compute = compute_chosen(without)
    found, wanted = compute(call, form), in_form(call, form)
    assert called == [] and found.dtype == dtype and not found[1].any()
    torch.testing.assert_close(found, wanted, atol=2e-2, rtol=2e-2)
    compute(call, all_experts(4))
    layer._apply_gate = type(layer)._apply_gate.__get__(layer)
    compute(ExpertsCall(layer.float(), *(call.hidden_states, call.index, call.weights)), form)
    layer.to(dtype).act_fn = torch.nn.GELU()
    compute(call, form)
    assert len(called) == 3


@pytest.mark.parametrize(
    ("tokens", "hidden", "changed", "by_kernel"),
    [
        (128, 256, {}, True),
        (129, 256, {}, False),
        (4, 128, {}, False),  # no whole tile on each of two cores
        (4, 256, {"has_bias": True}, False),
        (4, 256, {"has_gate": False}, False),
        (4, 256, {"is_concatenated": False}, False),
        (4, 256, {"has_post_expert_norm": True}, False),
        (4, 256, {"_apply_gate": lambda self, x: x}, False),
    ],
)
def test_experts_that_the_kernel_does_not_compute_are_not_its(
    tokens: int, hidden: int, changed: dict[str, Any], by_kernel: bool
) -> None:
    config = moe.CONFIGS["qwen3_moe"]()
    config.hidden_size = hidden
    kind = type("Experts", (Qwen3MoeExperts,), {})
    layer = kind(config).requires_grad_(False).to(torch.bfloat16)
    x = torch.zeros(tokens, hidden, dtype=torch.bfloat16)
    call = ExpertsCall(layer, x, torch.zeros(tokens, 3, dtype=torch.int64), torch.ones(tokens, 3))
    form = gather(expert_layer(call), tokens, chip_of("trn2"))
    for name, value in changed.items():
        setattr(kind if name == "_apply_gate" else layer, name, value)
    without = torch.zeros(1)
    assert (compute_chosen(lambda *_: without)(call, form) is not without) == by_kernel


def test_experts_around_the_kernel_are_certified(moe_checkpoint: Path, tmp_path: Path) -> None:
    artifact = export_tiny(moe_checkpoint, tmp_path / "out", target="hlo", certificate=True, **EXPERTS)
    assert certificate_of(artifact).comparisons
    assert calls_of(artifact, DECODES) == ["moe_tkg"] * LAYERS and not called_kernels(graph(artifact, CHUNKS))
    assert errors_of(artifact, DECODES) == []
    # Weights lie as the kernel takes them.
    inputs = read_graph_io(artifact / "graphs" / f"{DECODES}.hlo").inputs
    assert {each.shape for each in inputs if "experts" in each.name} == {(8, 256, 80), (8, 40, 256)}
    with pytest.raises(ValueError, match="kernels='moe_tkg' computes no layer of this model; leave it out"):
        export_tiny(moe_checkpoint, tmp_path / "other", target="hlo", **EXPERTS | {"dtype": "float32"})


def test_nki_is_given_both_as_the_library_declares_them(
    neuron_sdk: Callable[..., NeuronTools], moe_checkpoint: Path, tmp_path: Path
) -> None:
    neuron_sdk("trn2", "nki")
    names = ("attention_block_tkg", "moe_tkg")
    path = export_tiny(moe_checkpoint, tmp_path / "out", target="trn2", **EXPERTS | {"kernels": names})
    assert called_kernels(graph(path, DECODES)) == set(names)
    compiled = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in names}
    assert set(compiled["moe_tkg"]) == {*KERNELS["moe_tkg"].operands, "target", "lnc"}
    assert compiled["moe_tkg"]["expert_gate_up_weights"] == ["bfloat16", [8, 256, 2, 40]]
    assert compiled["attention_block_tkg"]["X"] == ["bfloat16", [1, 1, 256]]
    assert compiled["attention_block_tkg"]["attention_mask"] == ["uint8", [128, 1, 2, 1]]
    assert Artifact.open(path).config.kernels == names
