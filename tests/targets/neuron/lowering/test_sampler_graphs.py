# SPDX-License-Identifier: Apache-2.0
"""The sampler's HLO: elementary operators alone, and few, small collectives."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_config
from lowered import lower_model

from optimum_neuron.step.sampling.sampler import sample_by_sorting
from optimum_neuron.targets.neuron.graphs import hlo
from optimum_neuron.targets.neuron.graphs.io import SAMPLERS, LoweredGraph
from optimum_neuron.targets.neuron.graphs.state_graphs import score_graphs
from optimum_neuron.targets.neuron.lowering.lower import lower_state_graph
from optimum_neuron.targets.neuron.run.hlo_executor import HloProgram
from optimum_neuron.targets.neuron.sharding import ShardPlan


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


def _opcodes(graph: LoweredGraph) -> Counter[str]:
    return Counter(each.opcode for _, each in hlo.instructions(hlo.parse(graph.hlo)))


@pytest.mark.parametrize("ranks", [1, RANKS])
def test_the_sampler_needs_no_sort_and_no_wide_numbers(ranks: int) -> None:
    graph = _sampler(ranks)
    opcodes = _opcodes(graph)
    assert not FORBIDDEN & opcodes.keys()
    types = {hlo.dtype_name(each.shape) for _, each in hlo.instructions(hlo.parse(graph.hlo))}
    assert types <= {"float32", "int32", "uint8", "bool", "tuple"}
    # All numbers that a search compares with are in one operator: a compiler's time follows the number of operators.
    assert sum(count for name, count in opcodes.items() if name not in SHAPES) < 1200


def test_ranks_exchange_counts_sums_and_tokens_alone() -> None:
    graph = _sampler(RANKS)
    collectives = [
        each for _, each in hlo.instructions(hlo.parse(graph.hlo)) if each.opcode in ("all-gather", "all-reduce")
    ]
    # The best, nine searches by a digit for top-k, as many for top-p and their sum, the draw's sums and its token.
    assert len(collectives) == 1 + 9 + 1 + 9 + 1 + 1
    assert max(_elements(each) for each in collectives) <= ROWS * RANKS * 15 * 4


def _elements(instruction: Any) -> int:
    return int(torch.Size(instruction.shape.dimensions).numel())


def test_the_hlo_chooses_the_tokens_of_the_eager_formulation(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(3)
    logits = (torch.randn(ROWS, VOCAB, generator=random) * 3).bfloat16().float()  # with ties
    graph = _sampler(1)
    path = tmp_path / "sample_decode.hlo"
    path.write_bytes(graph.hlo)
    program = HloProgram(path, graph.io)
    for params in (
        [0, 1.0, 1.0, 0.0],
        [50, 0.9, 0.7, 0.0],
        [0, 0.5, 2.0, 0.01],
        [7, 1.0, 1e-6, 0.0],
        [0, 0.9, 1e6, 0.0],
    ):
        inputs = [torch.tensor([params]).expand(ROWS, -1).contiguous(), torch.rand(ROWS, generator=random)]
        slots, kept = torch.tensor([0, -1, 2, 3], dtype=torch.int32), torch.tensor([7, 8, 9, 10], dtype=torch.int32)
        given = dict(zip(program.io.names("input"), (*inputs, slots), strict=True))
        given |= {"scores.decode": logits, "chosen.tokens": kept}
        found, chosen = program.run_program([given[each.name].to(program.device) for each in program.io.inputs])
        expected = sample_by_sorting(logits, *inputs)
        assert torch.equal(found.cpu(), expected), params
        assert torch.equal(chosen.cpu(), torch.where(slots < 0, kept, expected))


def test_a_step_has_no_search_and_exchanges_its_largest_logit_alone(tiny_models: dict[str, Any]) -> None:
    config = tiny_config(target="hlo", batch_size=ROWS)
    decode = next(graph for graph in lower_model(tiny_models["llama"], config) if graph.kind == "token_generation")
    assert {"decode.sampling_params", "decode.uniforms"} <= set(decode.io.unused_inputs)
    assert [each.name for each in decode.io.outputs if each.alias_of == "scores.decode"] == ["scores.decode"]
    assert _opcodes(decode)["floor"] == 0  # of a token's weight
