# SPDX-License-Identifier: Apache-2.0
"""Lowering of graphs to HLO on this machine's CPU, whatever the device they are for: torch-xla traces placeholders.

torch.export exports a graph, it is decomposed, and its nodes run one by one on torch-xla placeholders. Tracing the transformers module
itself would crash: its mask code reads values. No weight is read, so shapes are enough.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from ....step.attention.kv_cache import KVCache
from ....step.ops import StepOps
from ....step.program import export_layers_once
from ....step.sampling.buffers import Scores
from ....step.spec import GraphSpec, TensorSpec
from ....step.step import example_inputs
from ..graphs import hlo
from ..graphs.io import (
    CACHE,
    CHOSEN,
    NARROW,
    SCORES,
    SNAPSHOTS,
    GraphIO,
    InputBinding,
    LoweredGraph,
    OutputBinding,
    Role,
)
from ..graphs.state_graphs import COPY_INPUTS, StateGraph
from ..sharding import ShardPlan
from . import canonical, kernel_calls, passes, weight_uses
from .decompositions import decompose
from .graph_modules import ScoreModule, SlotCopy, StateCopy
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
        vocab_size: of the logits that the graph returns.
        columns: of the logits that it leaves for a sampler; None: as many.
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
    """Lower a graph that is no step.

    Args:
        vocab_size: of the whole model, for a graph over logits.
        plan: how ranks share the logits; None for a single rank, or for copies.
    """
    if graph.inputs != COPY_INPUTS:
        module: nn.Module = ScoreModule(graph, vocab_size, plan)
    else:
        module = StateCopy(graph) if graph.read else SlotCopy(graph)
    with torch.no_grad():
        program = decompose(torch.export.export(module.eval(), example_inputs(graph.inputs), strict=False))
    ranks, read = world_size if plan is None else plan.world_size, tuple(each.name for each in graph.read)
    return lower_program(program, graph.name, graph.name, graph.inputs, graph.outputs, ranks, read=read)


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
    """Lower a decomposed program; its inputs and outputs get the names of `inputs` and `outputs`, in order.

    Args:
        read: names of states that it reads and does not update.

    Raises:
        ValueError: a state is not updated once, or a weight is updated.
    """
    _share_constants(program)
    bindings, literals = _bind_placeholders(program, [spec.name for spec in inputs])
    _lay_out(program, bindings)
    results = _bind_results(program, outputs, bindings, read)
    module, numbers, constants = trace(program, world_size)
    constants |= {numbers[index]: tensor for index, tensor in literals.items() if numbers[index] >= 0}
    passes.inline_constants(module, constants)
    kernel_calls.add_references(module)
    passes.narrow_types(module)
    passes.drop_tokens(module)
    passes.fold_trivial(module)
    passes.make_finite(module)
    if sums is not None:
        shared = {
            number
            for number, each in zip(numbers, bindings, strict=True)
            if each is not None and (each.role == "input" or each.name in sums.shared)
        }
        canonical.remove_unused(module)  # unused ones would count as users
        split_tokens(module, world_size, shared, sums)
    kept = _finish_module(module, name, bindings, numbers, results)
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
    kept: list[tuple[Tensor, torch.fx.Node]] = []
    for spec, node in zip(program.graph_signature.input_specs, placeholders(program), strict=True):
        if spec.kind != InputKind.CONSTANT_TENSOR:
            continue
        tensor = program.constants[spec.target or ""]
        same = (first for other, first in kept if other.dtype == tensor.dtype and torch.equal(other, tensor))
        if (first := next(same, None)) is None:
            kept.append((tensor, node))
        else:
            node.replace_all_uses_with(first)


def _bind_placeholders(
    program: ExportedProgram, input_names: Sequence[str]
) -> tuple[list[InputBinding | None], dict[int, Tensor]]:
    """Return each placeholder's binding, None for literal tensors, and these by their index."""
    bindings: list[InputBinding | None] = []
    literals: dict[int, Tensor] = {}
    names = iter(input_names)
    nodes = zip(program.graph_signature.input_specs, placeholders(program), strict=True)
    for index, (spec, node) in enumerate(nodes):
        target = spec.target or ""
        if spec.kind == InputKind.USER_INPUT:
            bindings.append(_make_binding(next(names), "input", node))
        elif spec.kind == InputKind.CONSTANT_TENSOR:
            # torch.export lifts tensors that the model's code makes; they are no part of the checkpoint.
            literals[index] = program.constants[target]
            bindings.append(None)
        else:
            is_state = target.startswith((CACHE, SNAPSHOTS, SCORES, CHOSEN))
            bindings.append(_make_binding(target, "state" if is_state else "weight", node))
    return bindings, literals


def _lay_out(program: ExportedProgram, bindings: list[InputBinding | None]) -> None:
    """Replace weights by what is stored of them; their placeholders stay, without a user or a binding."""
    numbers = {node: index for index, node in enumerate(placeholders(program))}
    stored, left = weight_uses.use_stored_weights(program)
    for node in left:
        bindings[numbers[node]] = None
    bindings += [_make_binding(name, "weight", node) for node, name in stored.items()]


def _make_binding(name: str, role: Role, node: torch.fx.Node) -> InputBinding:
    value = node.meta["val"]
    dtype = str(value.dtype).removeprefix("torch.")
    return InputBinding(name, role, tuple(value.shape), NARROW.get(dtype, dtype))


def _bind_results(
    program: ExportedProgram,
    outputs: Iterable[TensorSpec],
    bindings: Sequence[InputBinding | None],
    read: Collection[str],
) -> tuple[OutputBinding, ...]:
    """Return the step's outputs, then the new values of states, in the order of the module's result tuple."""
    states = {each.name: each for each in bindings if each is not None and each.role == "state"}
    results = [OutputBinding(spec.name, spec.shape, spec.dtype, None) for spec in outputs]
    mutated = {spec.target for spec in program.graph_signature.output_specs if spec.kind == OutputKind.BUFFER_MUTATION}
    results += [
        OutputBinding(each.name, each.shape, each.dtype, name) for name, each in states.items() if name in mutated
    ]
    # A sampler reads scores.
    updated = set(states) - set(read)
    different = {name for name in mutated ^ updated if not str(name).startswith(SCORES)}
    if different:
        names = ", ".join(sorted(map(str, different)))
        raise ValueError(f"the graph must update the cache's states once and nothing else; it differs in {names}")
    return tuple(results)


def _finish_module(
    module: Any,
    name: str,
    bindings: Sequence[InputBinding | None],
    numbers: Sequence[int],
    results: Sequence[OutputBinding],
) -> tuple[InputBinding, ...]:
    """Remove what nothing needs, order, name and alias; return the inputs that are left, in their order."""
    canonical.remove_unused(module)
    left = {parameter.parameter_number for parameter in hlo.parameters(module)}
    numbered = [
        (number, each) for number, each in zip(numbers, bindings, strict=True) if each is not None and number in left
    ]
    numbered.sort(key=lambda pair: _ROLE_ORDER.index(pair[1].role))  # stable
    kept = tuple(binding for _, binding in numbered)
    names = [binding.name for binding in kept]
    canonical.order_parameters(module, [number for number, _ in numbered], names)
    canonical.name_outputs(module, len(results))
    canonical.alias_outputs(
        module,
        {index: names.index(result.alias_of) for index, result in enumerate(results) if result.alias_of is not None},
    )
    canonical.canonicalize(module, name)
    return kept
