# SPDX-License-Identifier: Apache-2.0
"""A torch.export program becomes a plan."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from ..operators import NAMESPACE
from ..plan import Plan
from ..steps.steps import STATES, TorchCall
from . import calls, linear_calls, moves
from .arena import place_buffers
from .builder import PlanBuilder, Uses, arguments
from .elementwise import lower_elementwise
from .fusion import REGISTER_DTYPES, Pending
from .live import leave_out_dead
from .pointwise import ALIASES, CONVERSIONS, FILLED, RESHAPES, ROTATE_HALF, SHAPED, UNDEFINED, VIEWS, aten
from .rewrites import find_rotations, lower_rotation, split_heads
from .torch_calls import copy_by_torch, lower_torch_call, writes
from .values import KnownValue, StoredValue, contiguous


_OWN = getattr(torch.ops, NAMESPACE)
_CALLS: dict[Any, Any] = {
    _OWN.attend.default: calls.lower_attend,
    _OWN.write_cache.default: calls.lower_write_cache,
    _OWN.write_codes.default: calls.lower_write_codes,
    _OWN.expert_linear.default: linear_calls.lower_experts,
    _OWN.quantized_linear.default: linear_calls.lower_quantized_linear,
    _OWN.quantized_expert_linear.default: linear_calls.lower_quantized_experts,
    _OWN.output_rows.default: calls.lower_output_rows,
    _OWN.sample.default: calls.lower_sample,
    _OWN.convolve.default: calls.lower_convolve,
    _OWN.walk.default: calls.lower_walk,
    aten.linear.default: linear_calls.lower_linear,
    aten.matmul.default: linear_calls.lower_matmul,
    aten.embedding.default: moves.lower_select,
    aten.index_select.default: moves.lower_select,
    aten.index.Tensor: moves.lower_select,
    aten.repeat_interleave.self_int: moves.lower_repeat,
    aten.cat.default: moves.lower_cat,
    aten.stack.default: moves.lower_cat,
    aten.concat.default: moves.lower_cat,
    aten.copy_.default: moves.lower_copy,
    ROTATE_HALF: lower_rotation,
}
# What is computed once is kept in memory: not what is as large as a weight matrix.
_MAX_KEPT = 1 << 24  # elements
_WITHOUT_EFFECT = ("_assert", "sym_", "_check")


class UnknownOperationError(ValueError):
    """A node of a graph that a plan cannot have."""


def lower(program: ExportedProgram, tokens: int = 1, by_token: Collection[str] = ()) -> tuple[Plan, dict[str, Tensor]]:
    """Return the plan of a graph, and its constants by name.

    Args:
        program: is changed.
        tokens: of the graph, of which a run can leave out the last.
        by_token: numbers of the outputs that have a row per token; the others are needed whole.

    Raises:
        UnknownOperationError: the graph has an operation that is not one of torch's operators on tensors.
    """
    split_heads(program)
    find_rotations(program)
    graph = program.graph_module.graph
    writers = [node for node in graph.nodes if node.op == "call_function" and writes(node) and not _is_own(node)]
    live = _find_live(graph.nodes)
    builder = PlanBuilder(live, Uses(live, writers), writes_by_torch=bool(writers))
    fixed = _add_inputs(builder, program)
    begin = _lower_fixed(builder, graph.nodes, fixed)
    once = tuple(step for step in builder.steps if isinstance(step, TorchCall))
    builder.steps, builder.temporary = [], "arena"
    for node in graph.nodes:
        if node.op != "call_function" or node not in builder.live:
            continue
        if node in begin:
            builder.values[node] = begin[node]
            copy_by_torch(builder, node)
        elif node not in builder.values:
            _lower_node(builder, node)
    output = next(node for node in graph.nodes if node.op == "output")
    _add_outputs(builder, list(arguments(output)[0]))
    plan, constants = place_buffers(builder, once)
    return leave_out_dead(plan, tokens, by_token), constants


def _find_live(nodes: Iterable[Node]) -> set[Node]:
    """Return the nodes that an output or a write needs."""
    live: set[Node] = set()
    for node in reversed(list(nodes)):
        if node.op == "output" or node in live or (node.op == "call_function" and writes(node)):
            live.add(node)
            live.update(node.all_input_nodes)
    return live


def _add_inputs(builder: PlanBuilder, program: ExportedProgram) -> set[Node]:
    """Add the buffers of inputs and weights; return the nodes that are the same in each step."""
    fixed, count = set(), 0
    nodes = {node.name: node for node in program.graph_module.graph.nodes if node.op == "placeholder"}
    for spec in program.graph_signature.input_specs:
        node = nodes[spec.arg.name]
        if spec.kind is InputKind.USER_INPUT:
            memory = builder.memory("input", str(count), _count_bytes(builder.fake(node)))
            builder.values[node] = StoredValue(memory, contiguous(builder.fake(node).shape, builder.fake(node).dtype))
            count += 1
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) and spec.target is not None:
            fake = builder.fake(node)
            memory = builder.memory("tensor", spec.target, _count_bytes(fake))
            layout = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="meta")
            builder.values[node] = StoredValue(memory, layout)
            if not spec.target.startswith(STATES):
                fixed.add(node)
        elif spec.target is not None:  # what torch.export lifted out of the model's code
            builder.values[node] = KnownValue(program.constants[spec.target])
            fixed.add(node)
    return fixed


def _count_bytes(fake: Tensor) -> int:
    return fake.numel() * fake.dtype.itemsize


def _lower_fixed(builder: PlanBuilder, nodes: Iterable[Node], fixed: set[Node]) -> dict[Node, KnownValue]:
    """Compute what follows from weights and constants alone when the graph is bound, or now where it is known.

    Returns:
        Constants to which each step writes, as each finds them.
    """
    builder.temporary = "kept"
    begin: dict[Node, KnownValue] = {}
    for node in nodes:
        fake = builder.fake_or_none(node)
        shaped = node.target in SHAPED or node.target in FILLED
        if node.op != "call_function" or node not in builder.live or writes(node) or _is_own(node):
            continue
        if node.target in UNDEFINED:
            continue
        if node in builder.uses.written:  # not known for longer than the first write
            if shaped and fake is not None:
                begin[node] = KnownValue(_fill_constant(node, fake))
            elif not node.all_input_nodes:
                _evaluate_node(builder, node)
                begin[node] = builder.values.pop(node)
        elif shaped and fake is not None:
            builder.values[node] = KnownValue(_fill_constant(node, fake))
        elif all(isinstance(builder.values.get(source), KnownValue) for source in node.all_input_nodes):
            _evaluate_node(builder, node)
        elif fake is None or fake.numel() > _MAX_KEPT or not fixed.issuperset(node.all_input_nodes):
            continue
        elif node.target in CONVERSIONS and fake.dtype == builder.fake(node.all_input_nodes[0]).dtype:
            builder.share(node, node.all_input_nodes[0])
        elif not (node.target in VIEWS and _lower_view(builder, node)):
            lower_torch_call(builder, node)
        if node in builder.values:
            fixed.add(node)
    return begin


def _fill_constant(node: Node, fake: Tensor) -> Tensor:
    if node.target in FILLED:
        fill: Any = arguments(node)[-1] if node.target is aten.full_like.default else arguments(node)[2]
        return torch.full(fake.shape, fill, dtype=fake.dtype)
    return SHAPED[node.target](fake.shape, dtype=fake.dtype)


def _evaluate_node(builder: PlanBuilder, node: Node) -> None:
    """Compute a node from known operands."""

    def known(source: Node) -> Any:
        return builder.values[source].tensor

    args, kwargs = torch.fx.node.map_arg((arguments(node), node.kwargs), known)
    if not callable(node.target):
        return
    result = node.target(*args, **{name: value for name, value in kwargs.items() if name != "device"})
    if isinstance(result, Tensor):
        builder.values[node] = KnownValue(result)
    elif isinstance(result, list | tuple):
        builder.values[node] = [KnownValue(each) for each in result]


def _is_own(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == NAMESPACE


def _lower_node(builder: PlanBuilder, node: Node) -> None:
    name = getattr(node.target, "__name__", str(node.target))
    if name.startswith(_WITHOUT_EFFECT):
        return
    if name == "getitem":
        builder.values[node] = builder.values[arguments(node)[0]][arguments(node)[1]]
        return
    if not isinstance(node.target, torch._ops.OpOverload):
        raise UnknownOperationError(f"its graph calls {name}, which is no operator of torch")
    if node.target in ALIASES and not (node.target is aten.dropout.default and arguments(node)[2]):
        builder.share(node, arguments(node)[0])
        return
    if node.target in UNDEFINED:
        builder.values[node] = builder.allocate_like(node)
        return
    if node.target in VIEWS and _lower_view(builder, node):
        return
    lowering = _CALLS.get(node.target)
    if lowering is not None and lowering(builder, node):
        return
    if not lower_elementwise(builder, node):
        lower_torch_call(builder, node)


def _lower_view(builder: PlanBuilder, node: Node) -> bool:
    """Lower a view of an operand's memory; return False where the view needs a copy, and none can be made."""
    source = arguments(node)[0]
    if not isinstance(source, Node):
        return False
    value = builder.values[source]
    if isinstance(value, KnownValue) or (node in builder.uses.written and _is_copied(builder, node, source)):
        return False
    if isinstance(value, Pending) and not value.group.closed and _keeps_order(builder, node, source):
        builder.share(node, source)
        return True
    base = builder.resting(source)
    result = _on_layout(builder, node, base.layout)
    if result is None:  # of a copy, which lies in order, there is every view
        if base.layout.dtype not in REGISTER_DTYPES:
            return False
        copied = builder.allocate(base.layout.shape, base.layout.dtype)
        moves.store_value(builder, source, copied, copied.layout)
        base, result = copied, _on_layout(builder, node, copied.layout)
        if result is None:
            return False
    if isinstance(result, Tensor):
        builder.values[node] = StoredValue(base.memory, result)
    else:
        builder.values[node] = [StoredValue(base.memory, each) for each in result]
    return True


def _is_copied(builder: PlanBuilder, node: Node, source: Node) -> bool:
    """Return whether torch's result has memory of its own, as its strides there differ from a plan's."""
    fake = builder.fake(source)
    layout = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="meta")
    return _on_layout(builder, node, layout) is None


def _keeps_order(builder: PlanBuilder, node: Node, source: Node) -> bool:
    """Return whether a view only adds or drops dimensions of size 1."""
    fake = builder.fake_or_none(node)
    if fake is None:
        return False
    own = [size for size in fake.shape if size != 1]
    return node.target in RESHAPES and own == [size for size in builder.fake(source).shape if size != 1]


def _on_layout(builder: PlanBuilder, node: Node, layout: Tensor) -> Any:
    """Return the result's layouts within an operand's memory; None where it has memory of its own."""

    def meta(source: Node) -> Tensor:
        return layout if source is arguments(node)[0] else builder.fake(source).to("meta")

    args, kwargs = torch.fx.node.map_arg((arguments(node), node.kwargs), meta)
    assert callable(node.target)
    try:
        result = node.target(*args, **kwargs)
    except RuntimeError:  # a view that this layout does not have
        return None
    first = result if isinstance(result, Tensor) else result[0]
    same = first.untyped_storage()._cdata == layout.untyped_storage()._cdata
    if not same:
        return None
    return result if isinstance(result, Tensor) else list(result)


def _add_outputs(builder: PlanBuilder, outputs: list[Node]) -> None:
    for index, node in enumerate(outputs):
        fake = builder.fake(node)
        output = StoredValue(
            builder.memory("output", str(index), _count_bytes(fake)), contiguous(fake.shape, fake.dtype)
        )
        moves.store_value(builder, node, output, output.layout)
    builder.close_groups()
