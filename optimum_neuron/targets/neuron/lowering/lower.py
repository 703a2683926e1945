# SPDX-License-Identifier: Apache-2.0
"""Lowering of graphs to HLO on this machine's CPU, whatever the device they are for: torch-xla traces placeholders.

torch.export exports a graph, it is decomposed, and its nodes run one by one on torch-xla placeholders. Tracing the transformers module
itself would crash: its mask code reads values. No weight is read, so shapes are enough.

A search of the whole vocabulary has a thousand operators. In a graph apart, it is compiled once for a group of rows, and greedy steps run
without it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, replace

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from ....arrays import dtype_name
from ....step.attention.kv_cache import KVCache
from ....step.ops import StepOps
from ....step.program import export_layers_once
from ....step.sampling.buffers import ChosenTokens, Scores
from ....step.sampling.logprobs import logprobs
from ....step.spec import GraphSpec, TensorSpec
from ....step.state_specs import KEPT
from ....step.step import example_inputs
from ..graphs import hlo
from ..graphs import io as graph_io
from ..graphs.io import GraphIO, InputBinding, LoweredGraph, OutputBinding, Role
from ..graphs.state_graphs import COPY_INPUTS, StateGraph
from ..operators.sampler import gather_columns, sample
from ..sharding import RANK_BUFFER, ShardPlan
from . import kernel_calls, passes, weight_uses
from .decompositions import decompose
from .split_tokens import SumsRule, split_tokens
from .xla_trace import placeholders, trace


# The order of torch-neuronx's own graphs, on which its runtime counts.
_ROLE_ORDER: tuple[Role, ...] = ("input", "state", "weight")


def lower_step(
    model: nn.Module,
    cache: KVCache,
    spec: GraphSpec,
    ops: StepOps,
    vocab_size: int,
    world_size: int = 1,
    columns: int | None = None,
    sums: SumsRule | None = None,
    program: ExportedProgram | None = None,
) -> LoweredGraph:
    """Lower one step graph.

    Args:
        model: with parameters of any contents, also uninitialized ones; with `world_size` above 1, one rank's shard.
        columns: of the logits that the graph leaves for a sampler; None: as many as it returns, `vocab_size`.
        sums: decides the form in which ranks add up; None: every rank has all tokens.
        program: this graph, where it was traced and decomposed before; it is changed.

    Raises:
        ValueError: the graph computes something that no HLO module of ours can express.
    """
    if program is None:
        program = export_layers_once(model, cache, spec, ops, Scores.for_graph(spec, columns or vocab_size), decompose)
    graph = lower_program(program, spec.name, spec.kind, spec.inputs(), spec.outputs(vocab_size), world_size, sums)
    return replace(graph, io=replace(graph.io, spec=asdict(spec)))


def lower_state_graph(
    graph: StateGraph, vocab_size: int = 0, plan: ShardPlan | None = None, world_size: int = 1
) -> LoweredGraph:
    """Lower a graph that is no step; `plan` shares the `vocab_size` logits of one over logits."""
    module = RowCopy(graph) if graph.inputs == COPY_INPUTS else ScoreModule(graph, vocab_size, plan)
    with torch.no_grad():
        program = decompose(torch.export.export(module.eval(), example_inputs(graph.inputs), strict=False))
    ranks, read = world_size if plan is None else plan.world_size, [each.name for each in graph.read]
    return lower_program(program, graph.name, graph.name, graph.inputs, graph.outputs, ranks, read=read)


class ScoreModule(nn.Module):
    """A draw of a token for each row of a group, or its log-probabilities; without a plan, of a single rank's logits."""

    def __init__(self, graph: StateGraph, vocab_size: int, plan: ShardPlan | None) -> None:
        super().__init__()
        (scores,) = graph.read
        self.scores = Scores([(graph.group, scores.shape[0])], scores.shape[1])
        self.chosen = ChosenTokens(graph.updated[0].shape[0]) if graph.updated else None
        self.model = nn.Module()  # the rank's name in its weights begins so
        if plan is not None:
            self.model.register_buffer(RANK_BUFFER, torch.zeros(1, dtype=torch.int32))
        self._graph, self._vocab_size, self._plan = graph, vocab_size, plan

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Compute `step.sampling.sampler.sample` with the rows' slots, or `step.sampling.logprobs.logprobs`."""
        logits: Tensor = getattr(self.scores, self._graph.group)
        ranks = 1 if self._plan is None else self._plan.world_size
        if self.chosen is not None:
            sampling_params, uniforms, slots = inputs
            rank = torch.zeros(1, dtype=torch.int32) if self._plan is None else self.model.get_buffer(RANK_BUFFER)
            tokens = sample(logits, sampling_params, uniforms, rank, self._vocab_size, ranks)
            self.chosen.keep_tokens(tokens, slots)
            return (tokens,)
        (chosen,), outputs = inputs, self._graph.outputs
        count = outputs[-1].shape[1] if len(outputs[-1].shape) > 1 else 0
        found = logprobs(gather_columns(logits, self._vocab_size, ranks), chosen, count)
        return tuple(found)[: len(outputs)]


class RowCopy(nn.Module):
    """A copy of rows, each read whole and written over another, whatever that holds.

    It does `step.attention.kv_cache.copy_slot`, where columns beyond the length stay, or `HostStates.keep_state` and `restore_state`.
    """

    def __init__(self, graph: StateGraph) -> None:
        super().__init__()
        # Named so, buffers have the names of the states.
        self.kv_cache = KVCache(each for each in graph.states if each.name.startswith(graph_io.CACHE))
        copies = [each for each in graph.states if each.name.startswith(KEPT)]
        self.add_module(KEPT.rstrip("."), nn.Module())
        holder = self.get_submodule(KEPT.rstrip("."))
        holder.kv_cache = KVCache(replace(each, name=each.name.removeprefix(KEPT)) for each in copies)
        self._by_column = not graph.read
        pairs = zip(graph.read or graph.updated, graph.updated, strict=True)
        self._names = [(read.name, updated.name) for read, updated in pairs]

    def forward(self, source: Tensor, destination: Tensor, length: Tensor) -> tuple[Tensor, ...]:
        """Copy a row of each state; the arguments are `[1]` int32."""
        for read, updated in self._names:
            one, other = self.get_buffer(read), self.get_buffer(updated)
            if self._by_column:
                copied = (torch.arange(other.shape[2], dtype=torch.int32) < length)[None, None, :, None]
            else:
                copied = (length > 0).view([1] * other.dim())
            row = torch.where(copied, one.index_select(0, source), other.index_select(0, destination))
            other.index_put_((destination,), row)
        return ()


def lower_program(
    program: ExportedProgram,
    name: str,
    kind: str,
    inputs: Iterable[TensorSpec],
    outputs: Iterable[TensorSpec],
    world_size: int,
    sums: SumsRule | None = None,
    read: Collection[str] = (),
) -> LoweredGraph:
    """Lower a decomposed program; raise ValueError where a state that is not among the names `read` is not updated once, or a weight is.

    Its inputs and outputs get the names of `inputs` and `outputs`, in order.
    """
    _share_constants(program)
    bindings, literals = _bind_placeholders(program, [spec.name for spec in inputs])
    numbers_of = {node: index for index, node in enumerate(placeholders(program))}
    stored, left = weight_uses.use_stored_weights(program)
    for node in left:  # its placeholder stays, without a user
        bindings[numbers_of[node]] = None
    bindings += [_make_binding(name, "weight", node) for node, name in stored.items()]
    results = _bind_results(program, outputs, [each for each in bindings if each and each.role == "state"], read)
    module, numbers, constants = trace(program, world_size)
    constants |= {numbers[index]: tensor for index, tensor in literals.items() if numbers[index] >= 0}
    passes.inline_constants(module, constants)
    kernel_calls.add_references(module)
    passes.narrow_types(module)
    passes.fold_trivial(module)
    passes.make_finite(module)
    if sums is not None:
        pairs = zip(numbers, bindings, strict=True)
        shared = {number for number, each in pairs if each and (each.role == "input" or each.name in sums.shared)}
        passes.remove_unused(module)  # unused ones would count as users
        split_tokens(module, world_size, shared, sums)
    passes.remove_unused(module)
    present = {parameter.parameter_number for parameter in hlo.parameters(module)}
    numbered = [(number, each) for number, each in zip(numbers, bindings, strict=True) if each and number in present]
    numbered.sort(key=lambda pair: _ROLE_ORDER.index(pair[1].role))  # stable
    kept = tuple(binding for _, binding in numbered)
    passes.bind_names(module, [(number, each.name) for number, each in numbered], [each.alias_of for each in results])
    passes.canonicalize(module, name)
    data = hlo.serialize(module)
    io = GraphIO(
        inputs=kept,
        outputs=results,
        unused_inputs=tuple(each.name for each in bindings if each is not None and each not in kept),
        hlo_sha256=hashlib.sha256(data).hexdigest(),
        world_size=world_size,
    )
    return LoweredGraph(name, kind, data, io)


def _share_constants(program: ExportedProgram) -> None:
    """Let a program read equal constants, which each layer makes, from one placeholder; the others stay without a user."""
    kept: dict[object, torch.fx.Node] = {}
    for spec, node in zip(program.graph_signature.input_specs, placeholders(program), strict=True):
        if spec.kind == InputKind.CONSTANT_TENSOR:
            tensor = program.constants[spec.target or ""]
            contents = tensor.flatten().contiguous().view(torch.uint8).numpy().tobytes()
            first = kept.setdefault((tensor.dtype, tensor.shape, contents), node)
            if first is not node:
                node.replace_all_uses_with(first)


def _bind_placeholders(
    program: ExportedProgram, input_names: Sequence[str]
) -> tuple[list[InputBinding | None], dict[int, Tensor]]:
    """Return each placeholder's binding, None for literal tensors, and these by their index."""
    bindings: list[InputBinding | None] = []
    literals: dict[int, Tensor] = {}
    names = iter(input_names)
    for spec, node in zip(program.graph_signature.input_specs, placeholders(program), strict=True):
        target = spec.target or ""
        if spec.kind == InputKind.USER_INPUT:
            bindings.append(_make_binding(next(names), "input", node))
        elif spec.kind == InputKind.CONSTANT_TENSOR:
            # torch.export lifts tensors that the model's code makes; they are no part of the checkpoint.
            literals[len(bindings)] = program.constants[target]
            bindings.append(None)
        else:
            is_state = target.startswith((graph_io.CACHE, KEPT, graph_io.SCORES, graph_io.CHOSEN))
            bindings.append(_make_binding(target, "state" if is_state else "weight", node))
    return bindings, literals


def _make_binding(name: str, role: Role, node: torch.fx.Node) -> InputBinding:
    value = node.meta["val"]
    dtype = dtype_name(value.dtype)
    return InputBinding(name, role, tuple(value.shape), graph_io.NARROW.get(dtype, dtype))


def _bind_results(
    program: ExportedProgram, outputs: Iterable[TensorSpec], states: Sequence[InputBinding], read: Collection[str]
) -> tuple[OutputBinding, ...]:
    results = [OutputBinding(spec.name, spec.shape, spec.dtype, None) for spec in outputs]
    mutated = {spec.target for spec in program.graph_signature.output_specs if spec.kind == OutputKind.BUFFER_MUTATION}
    updated = [each for each in states if each.name in mutated]
    results += [OutputBinding(each.name, each.shape, each.dtype, each.name) for each in updated]
    expected = {each.name for each in states} - set(read)
    different = sorted(str(name) for name in mutated ^ expected)
    names = ", ".join(name for name in different if not name.startswith(graph_io.SCORES))  # which a sampler reads
    if names:
        raise ValueError(f"the graph must update the cache's states once and nothing else; it differs in {names}")
    return tuple(results)
