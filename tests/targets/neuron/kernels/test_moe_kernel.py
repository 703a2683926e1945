# SPDX-License-Identifier: Apache-2.0
"""The kernel of experts in decode steps: its reference, the graphs around it, and what NKI is given."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import moe
import pytest
import torch
from fakes.tools import NeuronTools
from helpers import export_tiny
from neuron_fixtures import certificate_of
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from optimum_neuron.artifact.artifact import Artifact
from optimum_neuron.step.features.experts.experts import ExpertsCall
from optimum_neuron.targets.neuron.graphs import hlo
from optimum_neuron.targets.neuron.graphs.io import read_graph_io
from optimum_neuron.targets.neuron.kernels.kernel import KERNELS
from optimum_neuron.targets.neuron.kernels.moe_tkg import compute_chosen
from optimum_neuron.targets.neuron.lint.lint import lint
from optimum_neuron.targets.neuron.lowering.kernel_calls import called_kernels, kernel_calls
from optimum_neuron.targets.neuron.operators.expert_forms import all_experts, gather
from optimum_neuron.targets.neuron.operators.experts import expert_layer, in_form
from optimum_neuron.targets.neuron.sdk.hardware import chip_of


pytest_plugins = ("fakes.plugin",)
DECODES, CHUNKS = "token_generation_context64", "chunked_prefill_chunk8_context64"
EXPERTS: dict[str, Any] = {
    "kernels": ("moe_tkg",), "batch_size": 1, "ctx_batch_size": 1, "dtype": "bfloat16", "mixed_step": False,
}  # fmt: skip
LAYERS = 2


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
    layer.act_fn = torch.nn.GELU()
    compute(call, form)
    assert len(called) == 2


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
    assert set(compiled) == {*KERNELS["moe_tkg"].operands, "target", "lnc"}
    assert compiled["expert_gate_up_weights"] == ["bfloat16", [8, 256, 2, 40]]
    assert Artifact.open(path).config.kernels == ("moe_tkg",)
