# SPDX-License-Identifier: Apache-2.0
"""Runs the lowered graphs of all ranks of a tiny model at once, for test_sharded_hlo.py, and compares with the eager target.

XLA's CPU client has as many devices as CPU_NUM_DEVICES says, and its collectives work between them. It tells collectives
apart by their channel, or else by the process's own number of the compiled module, which differs between ranks: so here,
and only here, they get channels.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch_xla
from helpers import eager_runner, generate, load_model, random_tokens, tiny_config
from safetensors.torch import load_file
from torch import Tensor
from torch_xla.core import xla_builder

from optimum_neuron.artifacts.weights import named_tensors, rank_weights_name
from optimum_neuron.config import NeuronConfig
from optimum_neuron.graphs.spec import GREEDY, graph_specs
from optimum_neuron.runtime.runner import GraphRunner, SamplingParams
from optimum_neuron.targets.neuron.lint.lint import lint
from optimum_neuron.targets.neuron.lowering import hlo
from optimum_neuron.targets.neuron.lowering.lower import LoweredGraph
from optimum_neuron.targets.neuron.lowering.lower_all import lower_all
from optimum_neuron.targets.neuron.sharding import shard_plan, write_sharded_weights


NOISE = 2e-6  # of logits between -1 and 1, in float32
SAMPLED = SamplingParams(20, 0.9, 0.8)


class Ranks:
    """An executable of several ranks, a thread each; every rank must return the same."""

    def __init__(
        self, graphs: Sequence[LoweredGraph], config: NeuronConfig, weights: Sequence[dict[str, Tensor]]
    ) -> None:
        count = config.tensor_parallel_size
        self._graphs = {graph.name: graph for graph in graphs}
        self._inputs = {spec.name: [tensor.name for tensor in spec.inputs()] for spec in graph_specs(config)}
        self._programs = {
            graph.name: xla_builder.computation_from_module_proto(graph.name, _with_channels(graph.hlo))
            for graph in graphs
        }
        states = [binding for binding in graphs[0].io.inputs if binding.role == "state"]
        self._bound = [
            {name: tensor.to(f"xla:{rank}") for name, tensor in weights[rank].items()}
            | {state.name: torch.zeros(state.shape).to(f"xla:{rank}") for state in states}
            for rank in range(count)
        ]
        self._pool = ThreadPoolExecutor(count)

    def run(self, graph: str, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        futures = [self._pool.submit(self._run, rank, graph, inputs) for rank in range(len(self._bound))]
        first, *others = [future.result() for future in futures]
        for other in others:
            assert all(torch.equal(left, right) for left, right in zip(first, other, strict=True))
        return first

    def _run(self, rank: int, name: str, inputs: Sequence[Tensor]) -> list[Tensor]:
        graph, bound, device = self._graphs[name], self._bound[rank], f"xla:{rank}"
        given = dict(zip(self._inputs[name], inputs, strict=True))
        arguments = [
            given[binding.name].to(device) if binding.role == "input" else bound[binding.name]
            for binding in graph.io.inputs
        ]
        results = torch_xla._XLAC._xla_user_computation(f"xla::{name}", arguments, self._programs[name])
        torch_xla._XLAC._xla_sync_multi(results, [device], True, True)
        outputs = []
        for output, result in zip(graph.io.outputs, results, strict=True):
            if output.alias_of is None:
                outputs.append(result.cpu())
            else:
                bound[output.alias_of] = result
        return outputs


def _with_channels(data: bytes) -> bytes:
    module = hlo.parse(data)
    collectives = [each for _, each in hlo.instructions(module) if each.opcode in ("all-reduce", "all-gather")]
    for channel, instruction in enumerate(collectives, start=1):
        instruction.channel_id = channel
    return hlo.serialize(module)


def check(checkpoint: Path, count: int) -> None:
    """Asserts that the ranks give the tokens of one rank in all graphs, greedy and sampled."""
    config = tiny_config(target="trn2", tensor_parallel_size=count)
    model = load_model(checkpoint)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "weights").mkdir()
        tied = write_sharded_weights(named_tensors(model), shard_plan(model, count), folder)
        weights = [load_file(folder / rank_weights_name(rank, count)) for rank in range(count)]
    for tensors in weights:
        tensors |= {alias: tensors[stored] for alias, stored in tied.items()}
    graphs = list(lower_all(checkpoint, config, tied, trust_remote_code=False))
    assert not [finding for graph in graphs for finding in lint(graph.name, graph.hlo, graph.io, "trn2")]
    executable = Ranks(graphs, config, weights)
    reference = eager_runner(model, tiny_config())
    for deterministic in (False, True):
        runner = GraphRunner(executable, config, graph_specs(config), deterministic=deterministic)
        for sampling in (GREEDY, SAMPLED):
            uniforms = torch.rand(6, generator=torch.Generator().manual_seed(1)).tolist()
            expected, logits = generate(reference, random_tokens(21), 6, sampling, uniforms)
            found, found_logits = generate(runner, random_tokens(21), 6, sampling, uniforms)
            assert found == expected
            assert (logits - found_logits).abs().max() < NOISE
