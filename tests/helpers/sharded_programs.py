# SPDX-License-Identifier: Apache-2.0
"""Runs the lowered graphs of all ranks of a tiny model at once, for test_sharded_hlo.py, and compares with the eager target, and rows.

XLA's CPU client has as many devices as CPU_NUM_DEVICES says, and its collectives work between them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers import eager_runner, generate, load_model, prefill_pieces, random_tokens, tiny_config
from safetensors.torch import load_file
from torch import Tensor, nn

from optimum_neuron.arrays import to_numpy, to_torch
from optimum_neuron.artifact.weights import named_tensors, rank_weights_name
from optimum_neuron.config import NeuronConfig
from optimum_neuron.runtime.runner import GraphRunner
from optimum_neuron.step.spec import GREEDY, LOGPROBS, SamplingParams, graph_specs
from optimum_neuron.targets.neuron.graphs.io import COPY_SLOT, PROBED, SAMPLERS, LoweredGraph
from optimum_neuron.targets.neuron.lint.lint import lint
from optimum_neuron.targets.neuron.lowering.lower_all import lower_all, trace_first
from optimum_neuron.targets.neuron.lowering.split_tokens import is_split
from optimum_neuron.targets.neuron.run.executors import AheadExecutable, returned_names
from optimum_neuron.targets.neuron.sharding import shard_plan, write_sharded_weights
from optimum_neuron.tools.certify.host_ranks import GraphRun, LoweredModule, RankGroup


NOISE = 2e-6  # of logits between -1 and 1, in float32
# Inputs of all graphs, by row, for those of decode rows and of chunk rows alike where their names say no group.
ROWS: dict[str, Any] = {
    "decode.input_ids": [[7], [8], [9]], "decode.position_ids": [[20]] * 3, "chunk.input_ids": [[*range(8)]] * 2,
    "chunk.position_ids": [[*range(24, 32)]] * 2, "seq_ids": [0, 1], "sampling_params": [[5, 0.9, 0.8, 0.0]] * 3,
    "uniforms": [0.1, 0.5, 0.9], "slots": [0, 1, 2], "chosen": [4, 5, 6], "source": [1], "destination": [2], "length": [9], "scale": [1.0],
}  # fmt: skip
SAMPLINGS = (GREEDY, SamplingParams(20, 0.9, 0.8), SamplingParams(temperature=1.0))  # the last from all tokens


class RanksExecutable(AheadExecutable):
    """An executable of several ranks; every rank must return the same."""

    runs_ahead = False

    def __init__(
        self, graphs: Sequence[LoweredGraph], config: NeuronConfig, weights: Sequence[dict[str, Tensor]]
    ) -> None:
        calls = {spec.name: [tensor.name for tensor in spec.inputs()] for spec in graph_specs(config)}
        super().__init__({graph.name: graph.io for graph in graphs}, calls)
        modules = {graph.name: LoweredModule(graph.hlo, graph.io) for graph in graphs}
        states = {each.name: each for graph in graphs for each in graph.io.inputs if each.role == "state"}
        zeros = {name: torch.zeros(state.shape, dtype=getattr(torch, state.dtype)) for name, state in states.items()}
        self._ranks = RankGroup(modules, [(own | zeros).items() for own in weights])

    def start(self, graph: str, inputs: Sequence[np.ndarray], *, logits: bool) -> Callable[[], Sequence[np.ndarray]]:
        outputs = self._run(graph, inputs)
        for draw, taken in self.find_due(graph, inputs):
            outputs |= self._run(draw.graph, taken)
        return lambda: [to_numpy(outputs[name]) for name in returned_names(self._described[graph])]

    def _run(self, graph: str, inputs: Sequence[np.ndarray]) -> dict[str, Tensor]:
        names = self._calls.get(graph) or self._described[graph].names("input")
        first, *others = self._ranks.run_graph(GraphRun(graph, dict(zip(names, map(to_torch, inputs), strict=True))))
        for other in others:
            assert all(torch.equal(first[name], other[name]) for name in first)
        return first


def _rank_weights(model: nn.Module, config: NeuronConfig) -> tuple[list[dict[str, Tensor]], dict[str, str]]:
    """The weights of each rank, tied ones under all their names; and these names."""
    count = config.tensor_parallel_size
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "weights").mkdir()
        plan = shard_plan(model, count)
        tied = write_sharded_weights(named_tensors(model), plan, folder, trace_first(model, plan, config)[1])
        weights = [load_file(folder / rank_weights_name(rank, count)) for rank in range(count)]
    return [own | {alias: own[stored] for alias, stored in tied.items()} for own in weights], tied


def check_rows(checkpoint: Path, count: int) -> None:
    """Asserts that a number of slot 0 that is infinite or NaN changes no bit of other slots, in any graph and on any rank."""
    config = tiny_config(target="trn2", tensor_parallel_size=count, output_logits=False, top_logprobs=3)
    weights, tied = _rank_weights(load_model(checkpoint), config)
    graphs = list(lower_all(checkpoint, config, tied, trust_remote_code=False))
    assert {graph.kind for graph in graphs} >= {"token_generation", "mixed", *SAMPLERS.values(), LOGPROBS, COPY_SLOT}
    modules = {graph.name: LoweredModule(graph.hlo, graph.io) for graph in graphs}
    ranks, random = RankGroup(modules, [each.items() for each in weights]), torch.Generator().manual_seed(0)
    for name, (_, io) in modules.items():
        given = {each.name: (each, getattr(torch, each.dtype)) for each in io.inputs if each.role == "input"}
        rows = {
            name: ROWS.get(name) or ROWS[name.partition(".")[2]][: each.shape[0]] for name, (each, _) in given.items()
        }
        inputs = {name: torch.tensor(rows[name], dtype=dtype) for name, (_, dtype) in given.items()}
        states = {each.name: each for each in io.inputs if each.role == "state"}
        clean = {
            key: torch.randn(each.shape, generator=random).to(getattr(torch, each.dtype))
            for key, each in states.items()
        }
        found = []
        for number in (0.5, torch.inf, -torch.inf, torch.nan):
            spoiled = {key: state.clone() for key, state in clean.items()}
            for state in spoiled.values():
                if state.is_floating_point():
                    state[0, ..., 0] = number
            outputs = ranks.run_graph(GraphRun(name, inputs, spoiled))
            kept = [{key: bound[key].cpu() for key in states} for bound in ranks._bound]
            found.append([own | left for own, left in zip(outputs, kept, strict=True)])
        for rank, own in enumerate(found[0]):
            for key, expected in own.items():
                assert expected[1:3].isfinite().all() and not (key.startswith(PROBED) and expected.any())
                for spoiled in found[1:]:
                    assert torch.equal(spoiled[rank][key][1:3], expected[1:3]), f"{name}: {key} of rank {rank}"


def check(
    checkpoint: Path, count: int, noise: float = NOISE, forms: Sequence[bool | None] = (None,), **sizes: Any
) -> None:
    """Asserts that the ranks give the tokens of one rank in all graphs, greedy and sampled.

    Args:
        noise: by which logits may differ.
        forms: whether ranks split tokens, None: where it takes less time; in all of them logits have the same bits.
        sizes: options of the graphs, in place of the tests' own.
    """
    config = tiny_config(target="trn2", tensor_parallel_size=count, **sizes)
    model = load_model(checkpoint)
    weights, tied = _rank_weights(model, config)
    reference = eager_runner(model, tiny_config(**sizes))
    uniforms = torch.rand(6, generator=torch.Generator().manual_seed(1)).tolist()
    expected = {each: generate(reference, random_tokens(21), 6, each, uniforms) for each in SAMPLINGS}
    found = []
    for split in forms:
        specs = graph_specs(config)
        kinds = None if split is None else frozenset(spec.kind for spec in specs if split)
        graphs = list(lower_all(checkpoint, config, tied, trust_remote_code=False, split=kinds))
        assert not [finding for graph in graphs for finding in lint(graph.name, graph.hlo, graph.io, "trn2")]
        assert any(is_split(graph.hlo) for graph in graphs) == bool(split)
        executable = RanksExecutable(graphs, config, weights)
        logits = []
        for deterministic in (False, True) if config.mixed_step else (False,):
            runner = GraphRunner(executable, config, specs, deterministic=deterministic)
            for sampling, (tokens, expected_logits) in expected.items():
                drawn, found_logits = generate(runner, random_tokens(21), 6, sampling, uniforms)
                assert drawn == tokens
                difference = float((expected_logits - found_logits).abs().max())
                assert difference < noise, f"{difference} in logits up to {float(expected_logits.abs().max())}"
                logits.append(found_logits)
        if split:
            cuts = [8, 8, 5], [5, 8, 8], [1, 7, 6, 7]
            pieces = [prefill_pieces(runner, slot, random_tokens(21), cut) for slot, cut in enumerate(cuts, start=1)]
            assert all(torch.equal(pieces[0], each) for each in pieces)
        found.append(logits)
    assert all(torch.equal(one, other) for other in found for one, other in zip(found[0], other, strict=True))
