# SPDX-License-Identifier: Apache-2.0
"""What operators lower to: samplers, sums of ranks, quantized products, and the steps of models of many types."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures.models import graph_model
from helpers import tiny_config
from lowered import lower_function, run_lowered
from quantized import ROUNDINGS, values_of
from tiny import TINY_CONFIGS
from torch import Tensor

from optimum_neuron.config import NeuronConfig
from optimum_neuron.parity.inspect import look_at
from optimum_neuron.step.attention.kv_cache import KVCache
from optimum_neuron.step.features.codes.weight import PACKED, QuantizedWeight
from optimum_neuron.step.sampling.sampler import sample_by_sorting
from optimum_neuron.step.spec import graph_specs
from optimum_neuron.step.state_specs import state_specs
from optimum_neuron.targets.neuron.graphs import hlo
from optimum_neuron.targets.neuron.graphs.io import SAMPLERS, LoweredGraph
from optimum_neuron.targets.neuron.graphs.state_graphs import score_graphs
from optimum_neuron.targets.neuron.lint.cost import graph_cost
from optimum_neuron.targets.neuron.lint.lint import lint
from optimum_neuron.targets.neuron.lowering.lower import lower_state_graph, lower_step
from optimum_neuron.targets.neuron.lowering.lower_all import lower_all
from optimum_neuron.targets.neuron.lowering.ops import NEURON_OPS
from optimum_neuron.targets.neuron.operators.codes import STORED_PRODUCT, blocks_of
from optimum_neuron.targets.neuron.run.executors import HloProgram
from optimum_neuron.targets.neuron.sdk.gather_widths import LEAST_WIDTH
from optimum_neuron.targets.neuron.sharding import ShardPlan
from optimum_neuron.targets.neuron.sharding.weights import FileWeight


ROWS, VOCAB, RANKS = 4, 5000, 4
# What some compiler refuses or is known to compute wrongly, and what would not end.
FORBIDDEN = {"sort", "topk", "custom-call", "while", "reduce-window", "scatter", "rng", "cholesky"}
# What computes nothing.
SHAPES = {"broadcast", "reshape", "constant", "parameter", "tuple"}


def _sampler(ranks: int) -> LoweredGraph:
    plan = None if ranks == 1 else ShardPlan("tiny", ranks, VOCAB, {})
    config = tiny_config(target="trn2", batch_size=ROWS, tensor_parallel_size=ranks)
    graph = next(each for each in score_graphs(config, VOCAB) if each.name == SAMPLERS["decode"])
    return lower_state_graph(graph, VOCAB, plan)


def _check_operators(graph: LoweredGraph) -> list[Any]:
    """Return the instructions of a sampler, without a sort and wide numbers."""
    instructions = [each for _, each in hlo.instructions(hlo.parse(graph.hlo))]
    opcodes = Counter(each.opcode for each in instructions)
    assert not FORBIDDEN & opcodes.keys()
    types = {hlo.dtype_name(each.shape) for each in instructions}
    assert types <= {"float32", "int32", "uint8", "bool", "tuple"}
    # All numbers that a search compares with are in one operator: a compiler's time follows the number of operators.
    assert sum(count for name, count in opcodes.items() if name not in SHAPES) < 1200
    return instructions


def test_ranks_exchange_logits_and_tokens_in_gathers_of_no_less_than_a_width_that_is_right() -> None:
    collectives = [each for each in _check_operators(_sampler(RANKS)) if each.opcode in hlo.COLLECTIVES]
    assert [each.opcode for each in collectives] == ["all-gather"] * 2
    assert {math.prod(each.shape.dimensions) for each in collectives} == {RANKS * LEAST_WIDTH}


def test_the_hlo_chooses_the_tokens_of_the_eager_formulation(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(3)
    logits = (torch.randn(ROWS, VOCAB, generator=random) * 3).bfloat16().float()  # with ties
    graph = _sampler(1)
    _check_operators(graph)
    path = tmp_path / "sample_decode.hlo"
    path.write_bytes(graph.hlo)
    program = HloProgram(path, graph.io)
    for params in [
        [0, 1.0, 1.0, 0.0],
        [50, 0.9, 0.7, 0.0],
        [0, 0.5, 2.0, 0.01],
        [7, 1.0, 1e-6, 0.0],
        [0, 0.9, 1e6, 0],
    ]:
        inputs = [torch.tensor([params]).expand(ROWS, -1).contiguous(), torch.rand(ROWS, generator=random)]
        slots, kept = torch.tensor([0, -1, 2, 3], dtype=torch.int32), torch.tensor([7, 8, 9, 10], dtype=torch.int32)
        given = dict(zip(program.io.names("input"), (*inputs, slots), strict=True))
        given |= {"scores.decode": logits, "chosen.tokens": kept}
        found, chosen = program.run_program([given[each.name].to(program.device) for each in program.io.inputs])
        expected = sample_by_sorting(logits, *inputs)
        assert torch.equal(found.cpu(), expected), params
        assert torch.equal(chosen.cpu(), torch.where(slots < 0, kept, expected))


@pytest.mark.parametrize(("float32", "dtype", "size"), [(False, "bfloat16", 2), (True, "float32", 4)])
def test_layers_are_summed_in_the_type_that_was_asked_for(
    float32: bool, dtype: str, size: int, tmp_path: Path
) -> None:
    TINY_CONFIGS["llama"]().save_pretrained(tmp_path)
    sizes: dict[str, Any] = {"target": "trn2", "tensor_parallel_size": 2, "dtype": "bfloat16", "mixed_step": False}
    config = tiny_config(**sizes, float32_reduce=float32, on_device_sampling=False)
    graphs = lower_all(tmp_path, config, {}, trust_remote_code=False)
    graph = next(each for each in graphs if each.kind == "token_generation")
    reduces = [each for _, each in hlo.instructions(hlo.parse(graph.hlo)) if each.opcode == "all-reduce"]
    # That of the embedding adds zeros to one rank's row, which no type rounds.
    assert [hlo.dtype_name(each.shape) for each in reduces] == ["bfloat16", *(dtype,) * 4]
    found, rows = graph_cost(graph.name, graph.hlo, graph.io, "trn2"), 3 * 64
    assert found.collectives["all-reduce"] == 5
    gathered = found.collective_bytes - 2 * rows - 4 * size * rows
    assert gathered in [3 * -(-LEAST_WIDTH // 3) * bits // 8 for bits in (16, 32)]


INPUTS, OUTPUTS = 96, 40
FEW, MANY = 3, 24  # rows: fewer than half of a group of 16, and more
# Of groups of inputs, with many rows, the weight is scaled before the product, and rounded to the type of x.
SCALED = ("int4", "int4 with a zero point", "int8 in groups", "fp4")


def stored(weight: QuantizedWeight) -> list[Tensor]:
    blocks = blocks_of(weight.scale.shape[1]) if weight.kind in PACKED else 0
    codes = FileWeight(("codes",), (1, 0), blocks).tensor(lambda _: weight.codes)
    others = [each.t() for each in (weight.scale, weight.shift) if each is not None]
    return [each.contiguous() for each in (codes, *others)]


def lowered(form: str, rows: int, dtype: torch.dtype) -> tuple[LoweredGraph, list[Tensor], QuantizedWeight]:
    torch.manual_seed(len(form) + rows)
    weight = ROUNDINGS[form](torch.randn(OUTPUTS, INPUTS))
    tensors = [torch.randn(rows, INPUTS).to(dtype), *stored(weight)]

    def product(x: Tensor, codes: Tensor, scale: Tensor, shift: Tensor | None = None) -> Tensor:
        return STORED_PRODUCT(x, codes, scale, shift, weight.kind, rows)

    return lower_function(product, tensors), tensors, weight


@pytest.mark.parametrize("rows", [FEW, MANY])
@pytest.mark.parametrize(
    ("form", "dtype"),
    [(form, torch.bfloat16) for form in ROUNDINGS]
    + [("int4 with a zero point", torch.float32), ("fp8", torch.float16)],
)
def test_products_are_those_of_the_dequantized_weight(form: str, dtype: torch.dtype, rows: int) -> None:
    graph, tensors, weight = lowered(form, rows, dtype)
    assert lint("function", graph.hlo, graph.io, "hlo") == []
    (found,) = run_lowered(graph, tensors)
    exact = values_of(weight.kind, weight.codes, weight.scale, weight.shift).double()
    expected = tensors[0].double() @ exact.t()
    sizes = tensors[0].double().abs() @ exact.abs().t()
    scaled = rows == MANY and form in SCALED
    rounding = torch.finfo(dtype).eps / 2 if scaled else 0.0
    assert ((found - expected).abs() <= (rounding + 1e-6) * sizes).all()
    # Scales follow the product where that takes less.
    instructions = [each for _, each in hlo.instructions(hlo.parse(graph.hlo))]
    assert {hlo.dtype_name(each.shape) for each in instructions if each.opcode == "dot"} == {"float32"}
    multiplied = [each.shape for each in instructions if each.opcode == "multiply"]
    wide = [math.prod(each.dimensions) for each in multiplied if hlo.dtype_name(each) == "float32"]
    assert any(each >= INPUTS * OUTPUTS / 2 for each in wide) == scaled


# With routers by groups, of one expert, with biases, between dense layers; without experts; and with recurrences. The full profile lowers
# most: no other test lowers the kinds of the first five.
NEEDED = ("bert", "diffllama", "gemma3", "glm_moe_dsa", "lfm2_moe")
FULL = (
    "afmoe", "deepseek_v4", "ernie4_5_moe", "flex_olmo", "granitemoe", "hy_v4", "llama4_text", "minimax_m3_vl_text", "phimoe",
    "apertus", "bitnet", "bloom", "codegen", "cohere2", "ctrl", "electra", "falcon", "gemma2", "gpt2", "mpt", "phi3",
    "bamba", "falcon_mamba", "jamba", "kimi_linear", "mamba2", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_next", "qwen4_exp_text", "zamba2",
)  # fmt: skip
FORBIDDEN_OPERATORS = {"sort", "topk", "reduce-window", "while", "custom-call", "rng", "rng-bit-generator"}
FORBIDDEN_TYPES = {"float64", "int64", "uint64", "uint32", "complex64", "complex128"}


@pytest.mark.parametrize("name", [*NEEDED, *(pytest.param(name, marks=pytest.mark.full) for name in FULL)])
def test_no_graph_needs_what_compilers_refuse(name: str) -> None:
    config = NeuronConfig(batch_size=2, sequence_length=64, prefill_chunk_size=8, dtype="float32", target="hlo")
    model = graph_model(name, torch.float32)
    spec = look_at(model)
    mixed = next(graph for graph in graph_specs(config) if graph.kind == "mixed")
    graph = lower_step(model, KVCache(state_specs(config, spec)), mixed, NEURON_OPS, spec.vocab_size)
    instructions = [each for _, each in hlo.instructions(hlo.parse(graph.hlo))]
    operators = Counter(each.opcode for each in instructions)
    assert operators["dot"] and operators["scatter"]
    assert not FORBIDDEN_OPERATORS & operators.keys()
    assert not FORBIDDEN_TYPES & {hlo.dtype_name(each.shape) for each in instructions}
    assert not [finding for finding in lint(graph.name, graph.hlo, graph.io, "hlo") if finding.severity == "error"]
