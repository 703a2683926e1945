# SPDX-License-Identifier: Apache-2.0
"""Lowered graphs for the tests of the Neuron target: of tiny models, and of single functions."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from optimum_neuron.config import NeuronConfig
from optimum_neuron.parity.inspect import inspect_model
from optimum_neuron.step.attention.kv_cache import KVCache
from optimum_neuron.step.spec import TensorSpec, graph_specs
from optimum_neuron.step.state_specs import state_specs
from optimum_neuron.targets.neuron.graphs.io import HLO_SUFFIX, LoweredGraph, write_graph
from optimum_neuron.targets.neuron.graphs.state_graphs import state_graphs
from optimum_neuron.targets.neuron.lowering.decompositions import decompose
from optimum_neuron.targets.neuron.lowering.lower import lower_program, lower_state_graph, lower_step
from optimum_neuron.targets.neuron.lowering.ops import NEURON_OPS
from optimum_neuron.targets.neuron.lowering.split_tokens import SumsRule
from optimum_neuron.targets.neuron.run.executors import HloProgram


def lower_model(model: nn.Module, config: NeuronConfig, kinds: Collection[str] | None = None) -> list[LoweredGraph]:
    """The graphs of a model of some kinds, or all of them, what copies slots last."""
    spec = inspect_model(model)
    cache, others = KVCache(state_specs(config, spec)), state_graphs(config, spec, spec.vocab_size)
    steps = [graph for graph in graph_specs(config) if kinds is None or graph.kind in kinds]
    graphs = [lower_step(model, cache, graph, NEURON_OPS, spec.vocab_size) for graph in steps]
    return graphs + [
        lower_state_graph(each, spec.vocab_size) for each in others if kinds is None or each.name in kinds
    ]


class _Function(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> tuple[Tensor]:
        return (self.function(*inputs),)


def lower_function(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], world_size: int = 1, sums: SumsRule | None = None
) -> LoweredGraph:
    """A graph that is one function of its inputs `x.0`, `x.1`, and so on."""
    given = {f"x.{index}": tensor for index, tensor in enumerate(inputs)}
    return lower_module(_Function(function), given, world_size=world_size, sums=sums)


def lower_module(
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    outputs: Sequence[str] = ("y",),
    name: str = "function",
    kind: str = "function",
    world_size: int = 1,
    sums: SumsRule | None = None,
) -> LoweredGraph:
    """A graph of a module, with its buffers as states and weights."""
    program = decompose(torch.export.export(module.eval(), tuple(inputs.values()), strict=False))
    results = program.graph.output_node().args[0]  # new values of buffers come first
    returned = zip(outputs, results[len(results) - len(outputs) :], strict=True)
    results = [_spec(output, node.meta["val"]) for output, node in returned]
    specs = [_spec(each, tensor) for each, tensor in inputs.items()]
    return lower_program(program, name, kind, specs, results, world_size, sums)


def run_lowered(graph: LoweredGraph, given: Mapping[str, Tensor] | Sequence[Tensor]) -> list[Tensor]:
    """What XLA computes on this CPU; inputs come by name, or are `x.0`, `x.1`, and so on."""
    named = given if isinstance(given, Mapping) else {f"x.{index}": each for index, each in enumerate(given)}
    with tempfile.TemporaryDirectory() as folder:
        write_graph(graph, Path(folder))
        program = HloProgram(Path(folder) / (graph.name + HLO_SUFFIX), graph.io)
    inputs = [named[each.name].contiguous().to(program.device) for each in graph.io.inputs]
    return [each.cpu() for each in program.run_program(inputs)]


def _spec(name: str, tensor: Tensor) -> TensorSpec:
    return TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
