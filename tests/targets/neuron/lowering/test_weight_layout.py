# SPDX-License-Identifier: Apache-2.0
"""Weights come as products take them: none is transposed in a graph, and layers that read one tensor are one product."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest
import torch
from helpers import load_model, tiny_config
from lowered import run_lowered
from moe import CONFIGS
from safetensors.torch import load_file
from tiny import TINY_CONFIGS, TINY_SIZES
from torch import Tensor, nn
from torch.export import ExportedProgram
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from optimum_neuron.artifact.weights import named_tensors
from optimum_neuron.parity.inspect import inspect_model
from optimum_neuron.step import program as programs
from optimum_neuron.step.interface import ATTENTION_NAME
from optimum_neuron.step.spec import TensorSpec, graph_specs
from optimum_neuron.step.step import StepModule
from optimum_neuron.targets import CompileJob, get_target
from optimum_neuron.targets.neuron.graphs import hlo
from optimum_neuron.targets.neuron.graphs.io import LoweredGraph, read_graph_io
from optimum_neuron.targets.neuron.lint.cost import graph_cost
from optimum_neuron.targets.neuron.lint.lint import Finding, lint
from optimum_neuron.targets.neuron.lowering import lower_all as lowering
from optimum_neuron.targets.neuron.lowering.decompositions import decompose
from optimum_neuron.targets.neuron.lowering.lower import lower_program
from optimum_neuron.targets.neuron.lowering.lower_all import lower_all, trace_first
from optimum_neuron.targets.neuron.lowering.weight_uses import weight_layout
from optimum_neuron.targets.neuron.sharding import shard_plan, whole_plan, write_sharded_weights
from optimum_neuron.targets.neuron.sharding.weights import FileWeight, WeightLayout
from optimum_neuron.tools.estimate.core_sizes import core_sizes
from optimum_neuron.tools.estimate.model_sizes import measure_model


MODELS = {**TINY_CONFIGS, "qwen3_moe": CONFIGS["qwen3_moe"]}
QKV = "q_proj-k_proj-v_proj"
# What each layer's own modules read at once.
JOINED = {
    "llama": {QKV, "gate_proj-up_proj"},
    "gemma2": {QKV, "gate_proj-up_proj"},
    "gpt_oss": {QKV},
    "deepseek_v3": {"q_a_proj-kv_a_proj_with_mqa", "gate_proj-up_proj"},
    "lfm2": {QKV, "w1-w3"},
    "qwen3_moe": {QKV},
}


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "deepseek_v3" else [pytest.mark.full]) for name in JOINED]
)
def test_no_graph_transposes_a_weight_and_layers_of_one_input_are_one_product(
    name: str, ranks: int, tmp_path: Path
) -> None:
    MODELS[name]().save_pretrained(tmp_path)
    config = tiny_config(target="trn2", tensor_parallel_size=ranks)
    steps = itertools.islice(lower_all(tmp_path, config, {}, trust_remote_code=False), len(graph_specs(config)))
    for graph in steps:
        assert not [each for each in lint(graph.name, graph.hlo, graph.io, "trn2") if each.rule == "transposed-weight"]
        names = graph.io.names("weight")
        joined = {part for each in names for part in each.split(".") if "-" in part}
        assert joined == JOINED[name]
        parts = {part for each in joined for part in each.split("-")}
        assert not [each for each in names if each.endswith("weight") and each.split(".")[-2] in parts]


class _Layers(nn.Module):
    """Layers that read one tensor, one of them tied to the table; layers of layers; a cast weight; one that code itself transposes."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed = nn.Embedding(7, 4)
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 5, bias=False)
        self.head = nn.Linear(4, 7, bias=False)
        self.down, self.up = (nn.Linear(*sizes, bias=False) for sizes in ((5, 2), (2, 3)))
        self.router, self.gate = nn.Parameter(torch.empty(2, 4)), nn.Parameter(torch.empty(2, 4))
        self.experts = nn.Parameter(torch.empty(2, 6, 4))
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        routed = nn.functional.linear(x.double(), self.router.double()).float()
        gate = self.gate.double()  # which two read
        gated = (nn.functional.linear(x.double(), gate) * gate.sum()).float()
        y = self.b(torch.tanh(self.b(x)[..., :4]))
        expert = x.expand(2, *x.shape[1:]) @ self.experts.permute(0, -1, 1)
        return torch.cat([self.a(x), y, self.head(x), routed, gated, *expert[:, None], self.up(self.down(y))], -1)


class _Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = _Layers()

    def forward(self, ids: Tensor) -> tuple[Tensor]:
        return (self.model(ids),)


IDS = torch.tensor([[1, 6, 0]], dtype=torch.int32)


def export(step: nn.Module) -> torch.export.ExportedProgram:
    with torch.no_grad():
        return torch.export.export(step.eval(), (IDS,), strict=False)


def lower(step: nn.Module) -> LoweredGraph:
    inputs, outputs = [TensorSpec("x.ids", (1, 3), "int32")], [TensorSpec("y", (1, 3, 34), "float32")]
    return lower_program(decompose(export(step)), "function", "function", inputs, outputs, 1)


@torch.no_grad()
def test_what_is_stored_gives_the_layers_results() -> None:
    step = _Step()
    layout = weight_layout(decompose(export(step)))
    table = {"model.embed.weight", "model.head.weight"}
    assert {each.order for each in layout.stored if "model.experts" in each.parts} == {(0, 2, 1)}
    assert [{*each.parts} for each in layout.stored if len(each.parts) > 1] in [
        [{"model.a.weight", tied}] for tied in sorted(table)
    ]
    replaced = ["a.weight", "b.weight", "down.weight", "up.weight", "router", "experts"]
    assert layout.replaced == {f"model.{name}" for name in replaced}
    graph = lower(step)
    assert len(set(graph.io.names("weight"))) == len(graph.io.names("weight"))  # also of a layer that runs twice
    stored = {each.name: each.tensor(step.get_parameter) for each in layout.stored}
    given = {"x.ids": IDS} | dict(step.named_parameters(remove_duplicate=False)) | stored
    (found,) = run_lowered(graph, given)
    (expected,) = step(IDS)
    assert (found - expected).abs().max() < 2e-6
    assert graph_cost("function", graph.hlo, graph.io, "trn2").transposed == 0


def test_a_weight_that_a_product_takes_in_another_order_is_named() -> None:
    graph = lower(_Step())
    module = hlo.parse(graph.hlo)
    dots = (each for _, each in hlo.instructions(module) if each.opcode == "dot")
    product = next(each for each in dots if "model.b" in hlo.module_path(each))
    weight = next(each for each in hlo.parameters(module) if each.name.startswith("model.b"))
    turned = {"name": "transpose.999", "opcode": "transpose", "id": 999, "dimensions": [1, 0], "shape": weight.shape}
    hlo.entry(module).instructions.add(**turned, operand_ids=[weight.id])

    def find_broken() -> Finding:
        findings = lint("g", hlo.serialize(module), graph.io, "trn2")
        (found,) = [each for each in findings if each.rule == "transposed-weight"]
        return found

    product.operand_ids[1] = 999
    assert find_broken().instruction == "transpose.999" and weight.name in find_broken().problem
    del hlo.entry(module).instructions[-1]
    product.operand_ids[1] = weight.id
    product.dot_dimension_numbers.rhs_contracting_dimensions[:] = [1]
    assert f"over dimension 1 of the weight {weight.name}" in find_broken().problem


def test_names_of_what_is_stored_tell_its_parts_and_their_order() -> None:
    layers = ("model.0.self.q.weight", "model.0.self.k.weight")
    assert FileWeight(layers, (1, 0)).name == "model.0.self.q-k.weight.order_1_0"
    assert FileWeight(("model.a.b",), (0, 2, 1)).name == "model.a.b.order_0_2_1"
    assert FileWeight(("model.a.a.w", "model.a.w"), (1, 0)).name == "model.a.a-.w.order_1_0"
    assert len({FileWeight(parts, (1, 0)).name for parts in (layers, layers[::-1], layers[:1])}) == 3
    packed = FileWeight(("a.codes",), (1, 0), 3)
    assert packed.name == "a.codes.order_1_0_halves_3" and packed.shape({"a.codes": (2, 48)}.__getitem__) == (48, 2)


@torch.no_grad()
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_s_file_holds_its_own_parts_side_by_side_and_a_tied_table_in_both_forms_as_estimates_count_it(
    ranks: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(**TINY_SIZES, tie_word_embeddings=True, attn_implementation=ATTENTION_NAME)
    model = AutoModelForCausalLM.from_config(config).eval()
    tensors, plan = named_tensors(model), whole_plan(model) if ranks == 1 else shard_plan(model, ranks)
    _, layout = trace_first(model, plan, tiny_config(target="trn2", tensor_parallel_size=ranks))
    assert layout != WeightLayout()
    (tmp_path / "weights").mkdir()
    tied = write_sharded_weights(tensors, plan, tmp_path, layout)
    assert tied == {"model.lm_head.weight": "model.model.embed_tokens.weight"}
    sizes = measure_model(AutoConfig.for_model(**config.to_dict()), "llama", "float32", trust_remote_code=False)
    own = "model.model.layers.1.self_attn."
    for rank, path in enumerate(sorted((tmp_path / "weights").iterdir())):
        stored = load_file(path)
        parts = [plan.shard(tensors[f"{own}{each}_proj.weight"], f"{own}{each}_proj.weight", rank) for each in "qkv"]
        assert torch.equal(stored[f"{own}q_proj-k_proj-v_proj.weight.order_1_0"], torch.cat(parts).t())
        assert not [name for name in stored if name.endswith("_proj.weight")]
        table = stored["model.model.embed_tokens.weight"]
        assert any(torch.equal(tensor, table.t()) for name, tensor in stored.items() if name.endswith("order_1_0"))
        assert sum(tensor.nbytes for tensor in stored.values()) == core_sizes(sizes, ranks).weight_bytes


def test_each_graph_is_traced_once_and_the_first_lowered_as_if_it_were_traced_from_the_config(
    sharp_checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced: list[str] = []
    trace = programs._trace_module

    def count(module: StepModule) -> ExportedProgram:
        traced.append(module.spec.name)
        return trace(module)

    monkeypatch.setattr(programs, "_trace_module", count)
    monkeypatch.setattr(lowering, "lower_all", lower_all)  # not what other tests have lowered
    monkeypatch.setattr(lowering, "trace_first", trace_first)
    model, config = load_model(sharp_checkpoints["llama"]), tiny_config(target="hlo", batch_size=1, ctx_batch_size=1)
    shutil.copy(sharp_checkpoints["llama"] / "config.json", tmp_path)
    for name in ("weights", "graphs"):
        (tmp_path / name).mkdir()
    target, graphs = get_target("hlo"), graph_specs(config)
    tied = target.write_model(model, config, tmp_path)
    target.compile(CompileJob(tmp_path, config, inspect_model(model), graphs, tied, trust_remote_code=False))
    assert traced == [graph.name for graph in graphs]
    anew = next(lower_all(tmp_path, config, tied, trust_remote_code=False))
    assert (tmp_path / "graphs" / f"{anew.name}.hlo").read_bytes() == anew.hlo
    assert read_graph_io(tmp_path / "graphs" / f"{anew.name}.hlo") == anew.io
