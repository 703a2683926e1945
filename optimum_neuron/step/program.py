# SPDX-License-Identifier: Apache-2.0
"""The step module as one `torch.export` program, and the nodes of all layers from a trace of a few."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, OutputSpec, TensorArgument
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from .attention.kv_cache import KVCache
from .ops import DEFAULT_OPS, StepOps
from .sampling.buffers import Scores
from .spec import SAMPLING_PARAMS, UNIFORMS, GraphSpec
from .step import StepModule, example_inputs
from .tracing.alike import NotAlikeError, Rename, make_renaming
from .tracing.repeated_layers import LayerTrace, Template, few_layers, operators


logger = logging.getLogger(__name__)


def export_graph(
    model: nn.Module, cache: KVCache, spec: GraphSpec, ops: StepOps = DEFAULT_OPS, scores: Scores | None = None
) -> ExportedProgram:
    """Export a step graph, the source of every compiled target; raise RuntimeError where an input has no user in it.

    Parameters and buffers are named `model.*`, states `kv_cache.*`, logits for a sampler in another graph `scores.*`, and the slots' last
    tokens `chosen.tokens`.
    """
    module = StepModule(model, cache, spec, ops, scores).eval()
    program = _trace_module(module)
    _check_inputs(program, module)
    return program


def export_layers_once(
    model: nn.Module,
    cache: KVCache,
    spec: GraphSpec,
    ops: StepOps = DEFAULT_OPS,
    scores: Scores | None = None,
    decompose: Callable[[ExportedProgram], ExportedProgram] = lambda program: program,
) -> ExportedProgram:
    """Export the same program in less time, from a few of the layers that are shown to be the same; `decompose` rewrites each trace."""
    module = StepModule(model, cache, spec, ops, scores).eval()
    with few_layers(module.model) as layers:
        try:
            if layers.templates:  # else no trace would be shorter
                program = _trace_module(module)
                if layers.is_refused:
                    raise NotAlikeError
                program = decompose(program)
                expand_layers(program, layers)
                _check_inputs(program, module)
                return program
        except Exception as error:  # if it is the model's own, it will come again
            logger.debug("graph %s: all layers are traced (%s: %s)", spec.name, type(error).__name__, error)
    return decompose(export_graph(model, cache, spec, ops, scores))


def _trace_module(module: StepModule) -> ExportedProgram:
    with torch.no_grad():
        return torch.export.export(module, example_inputs(module.spec.inputs()), strict=False)


def _check_inputs(program: ExportedProgram, module: StepModule) -> None:
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    others = () if module.scores is None else (SAMPLING_PARAMS, UNIFORMS)  # a sampler's
    for argument, tensor in zip(program.graph_signature.user_inputs, module.spec.inputs(), strict=True):
        if not placeholders[argument].users and tensor.name.split(".")[1] not in others:
            raise RuntimeError(f"graph {module.spec.name}: input {tensor.name} has no user after export")


_BEGIN, _END, _REPEATED = (getattr(operators, name).default for name in ("begin", "end", "repeated"))


def expand_layers(program: ExportedProgram, trace: LayerTrace) -> None:
    """Give a program that was traced within `few_layers` the nodes of all layers; raise NotAlikeError where these are not determined."""
    nodes = list(program.graph_module.graph.nodes)
    if not any(node.target in (_BEGIN, _END, _REPEATED) for node in nodes):
        return
    segments = _Segments(program, trace)
    for template in trace.templates:
        if any(trace.layers[_number_of(node)][0] is template for node in nodes if node.target is _REPEATED):
            segments.check_alike(template)
    graph = Graph()
    made: dict[Node, Node] = {}
    for node in nodes:
        if node.target in (_BEGIN, _END):
            made[node] = made[node.all_input_nodes[0]]
        elif node.target is _REPEATED:
            made[node] = segments.copy_layer(node, graph, made)
        elif node.op != "output":
            made[node] = graph.node_copy(node, made.__getitem__)
    segments.add_results(graph, made)
    program.graph_module.graph = graph


def _number_of(node: Node) -> int:
    number: Any = node.args[1]
    return int(number)


class _Segments:
    """The nodes of each layer that was traced, between its marks."""

    def __init__(self, program: ExportedProgram, trace: LayerTrace) -> None:
        self._trace = trace
        self._constants = program.constants
        self._signature = program.graph_signature
        nodes = list(program.graph_module.graph.nodes)
        self._output = nodes[-1]
        place = {node: index for index, node in enumerate(nodes)}
        by_name = {node.name: node for node in nodes if node.op == "placeholder"}
        self._specs: dict[Node, InputSpec] = {
            by_name[spec.arg.name]: spec
            for spec in program.graph_signature.input_specs
            if spec.kind is not InputKind.USER_INPUT
        }
        self._placeholders = {spec.target: node for node, spec in self._specs.items()}
        ends = {_number_of(node): node for node in nodes if node.target is _END}
        self._ends: dict[tuple[int, int], Node] = {}
        self._begins: dict[tuple[int, int], Node] = {}
        self._inner: dict[tuple[int, int], list[Node]] = {}
        for begin in nodes:
            if begin.target is _BEGIN and _number_of(begin) in ends:
                template, member = trace.layers[_number_of(begin)]
                key, end = (id(template), member), ends[_number_of(begin)]
                self._begins[key], self._ends[key] = begin, end
                self._inner[key] = nodes[place[begin] + 1 : place[end]]
        # What a decomposed program returns of the states that it writes, by name; and of layers that are copied.
        results = zip(self._signature.output_specs, self._program_results, strict=True)
        self._states = {spec.target or "": node for spec, node in results if spec.kind is OutputKind.BUFFER_MUTATION}
        self._copied: dict[str, Node] = {}

    @property
    def _program_results(self) -> list[Node]:
        results: Any = self._output.args[0]
        return list(results)

    def check_alike(self, template: Template) -> None:
        """Raise NotAlikeError unless the layers that were traced are the same, and other nodes read only a layer's end."""
        first, *others = ((id(template), member) for member in template.traced)
        returned = set(self._states.values())
        for key in (first, *others):
            own = {*self._inner[key], self._ends[key]}
            for node in self._inner[key]:
                if any(user not in own and not (user is self._output and node in returned) for user in node.users):
                    raise NotAlikeError
        for key in others:
            rename = make_renaming(template.kind, template.traced[0], key[1])
            if self._describe_layer(first, rename) != self._describe_layer(key, str):
                raise NotAlikeError

    def _describe_layer(self, key: tuple[int, int], rename: Rename) -> Any:
        """Return what a layer's nodes compute of which tensors, with the names that these have for another layer."""
        begin = self._begins[key]
        own = {begin: "begin"}

        def describe_source(node: Node) -> str:
            spec = self._specs.get(node)
            if spec is None or spec.target is None or spec.kind is not InputKind.CONSTANT_TENSOR:
                return own[node] if node in own else self._find_counterpart(node, rename).name
            lifted = self._constants[spec.target]  # out of the code, by torch.export
            return f"{lifted.dtype} {lifted.tolist()}"

        nodes = []
        for node in self._inner[key]:
            sources = map_arg((node.args, node.kwargs), describe_source)
            nodes.append((node.op, node.target, repr(sources), _list_forms(node)))
            own[node] = f"node {len(nodes)}"
        written = {rename(name): own[node] for name, node in self._states.items() if node in own}
        return nodes, written, describe_source(self._ends[key].all_input_nodes[0])

    def _find_counterpart(self, node: Node, rename: Rename) -> Node:
        """Return what another layer reads in the place of a node."""
        spec = self._specs.get(node)
        if spec is None or spec.target is None or spec.kind is InputKind.CONSTANT_TENSOR:
            return node  # constants may be named by a layer, and are numbered through all layers
        renamed = rename(spec.target)
        if renamed not in self._placeholders:
            raise NotAlikeError
        return self._placeholders[renamed]

    def copy_layer(self, node: Node, graph: Graph, made: dict[Node, Node]) -> Node:
        """Append the nodes of the layer that a node stands for; return its result."""
        template, member = self._trace.layers[_number_of(node)]
        key = (id(template), template.traced[0])
        rename = make_renaming(template.kind, template.traced[0], member)
        own = {self._begins[key]: made[node.all_input_nodes[0]]}

        def find_source(read: Node) -> Node:
            return own[read] if read in own else made[self._find_counterpart(read, rename)]

        for each in self._inner[key]:
            own[each] = graph.node_copy(each, find_source)
            stack = each.meta.get("nn_module_stack") or {}
            renamed = {name: (rename(f"{path}.")[:-1], *others) for name, (path, *others) in stack.items()}
            own[each].meta = {**each.meta, "nn_module_stack": renamed}
        self._copied |= {rename(name): own[state] for name, state in self._states.items() if state in own}
        return own[self._ends[key].all_input_nodes[0]]

    def add_results(self, graph: Graph, made: dict[Node, Node]) -> None:
        """Append the program's results, states first, in the order of their inputs."""
        states = {name: made[node] for name, node in self._states.items()} | self._copied
        order = [spec.target for spec in self._signature.input_specs if spec.target in states]
        results = [(OutputKind.BUFFER_MUTATION, states[name], name) for name in order if name is not None]
        for spec, node in zip(self._signature.output_specs, self._program_results, strict=True):
            if spec.kind is not OutputKind.BUFFER_MUTATION:
                results.append((spec.kind, made[node], spec.target))
        graph.output(tuple(node for _, node, _ in results)).meta = self._output.meta
        self._signature.output_specs[:] = [
            OutputSpec(kind, TensorArgument(node.name), target) for kind, node, target in results
        ]


def _list_forms(node: Node) -> list[Any]:
    values = node.meta.get("val")
    forms: list[Any] = []
    for each in values if isinstance(values, list | tuple) else [values]:
        if isinstance(each, Tensor):
            if any(not isinstance(size, int) for size in each.shape):  # sizes that follow values
                raise NotAlikeError
            forms.append((each.shape, each.dtype, each.stride()))
        else:
            forms.append(each)
    return forms
