# SPDX-License-Identifier: Apache-2.0
"""From a torch.export program of a step graph to its plan."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from ..operators import NAMESPACE
from ..plan.program import STATES, Plan, TorchCall
from ..plan.values import Known, Stored, contiguous
from .arena import place_buffers
from .builder import PlanBuilder, arguments
from .calls import (
    lower_attend,
    lower_cat,
    lower_convolve,
    lower_copy,
    lower_experts,
    lower_linear,
    lower_matmul,
    lower_output_rows,
    lower_repeat,
    lower_sample,
    lower_select,
    lower_walk,
    lower_write_cache,
    lower_write_codes,
    store,
)
from .elementwise import lower_elementwise
from .fusion import REGISTER_DTYPES, Pending
from .head_linears import split_heads
from .pointwise import ALIASES, CONVERSIONS, FILLED, ROTATE_HALF, SHAPED, UNDEFINED, VIEWS, aten
from .quantized_calls import lower_quantized_experts, lower_quantized_linear
from .rotations import find_rotations, lower_rotation
from .torch_calls import copy_by_torch, lower_torch_call, writes
from .uses import Uses


_OWN = getattr(torch.ops, NAMESPACE)
_CALLS: dict[Any, Any] = {
    _OWN.attend.default: lower_attend,
    _OWN.write_cache.default: lower_write_cache,
    _OWN.write_codes.default: lower_write_codes,
    _OWN.expert_linear.default: lower_experts,
    _OWN.quantized_linear.default: lower_quantized_linear,
    _OWN.quantized_expert_linear.default: lower_quantized_experts,
    _OWN.output_rows.default: lower_output_rows,
    _OWN.sample.default: lower_sample,
    _OWN.convolve.default: lower_convolve,
    _OWN.walk.default: lower_walk,
    aten.linear.default: lower_linear,
    aten.matmul.default: lower_matmul,
    aten.embedding.default: lower_select,
    aten.index_select.default: lower_select,
    aten.index.Tensor: lower_select,
    aten.repeat_interleave.self_int: lower_repeat,
    aten.cat.default: lower_cat,
    aten.stack.default: lower_cat,
    aten.concat.default: lower_cat,
    aten.copy_.default: lower_copy,
    ROTATE_HALF: lower_rotation,
}
# What is computed once is kept in memory: not what is as large as a weight matrix.
_MAX_KEPT = 1 << 24  # elements
_WITHOUT_EFFECT = ("_assert", "sym_", "_check")


class UnknownOperationError(ValueError):
    """A graph holds a node that a plan cannot have."""


def lower(program: ExportedProgram) -> tuple[Plan, dict[str, Tensor]]:
    """The plan of a step graph, and its constants by name.

    Raises:
        UnknownOperationError: the graph has an operation that is not one of torch's operators on tensors.
    """
    split_heads(program)
    find_rotations(program)
    graph = program.graph_module.graph
    writers = [node for node in graph.nodes if node.op == "call_function" and writes(node) and not _is_own(node)]
    live = _live(graph.nodes)
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
    return place_buffers(builder, once)


def _live(nodes: Iterable[Node]) -> set[Node]:
    """Nodes that an output or a write needs."""
    live: set[Node] = set()
    for node in reversed(list(nodes)):
        if node.op == "output" or node in live or (node.op == "call_function" and writes(node)):
            live.add(node)
            live.update(node.all_input_nodes)
    return live


def _add_inputs(builder: PlanBuilder, program: ExportedProgram) -> set[Node]:
    """Returns the nodes that are the same in each step: weights and constants."""
    fixed, count = set(), 0
    nodes = {node.name: node for node in program.graph_module.graph.nodes if node.op == "placeholder"}
    for spec in program.graph_signature.input_specs:
        node = nodes[spec.arg.name]
        if spec.kind is InputKind.USER_INPUT:
            memory = builder.memory("input", str(count), _bytes(builder.fake(node)))
            builder.values[node] = Stored(memory, contiguous(builder.fake(node).shape, builder.fake(node).dtype))
            count += 1
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) and spec.target is not None:
            fake = builder.fake(node)
            memory = builder.memory("tensor", spec.target, _bytes(fake))
            layout = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="meta")
            builder.values[node] = Stored(memory, layout)
            if not spec.target.startswith(STATES):
                fixed.add(node)
        elif spec.target is not None:  # what torch.export lifted out of the model's code
            builder.values[node] = Known(program.constants[spec.target])
            fixed.add(node)
    return fixed


def _bytes(fake: Tensor) -> int:
    return fake.numel() * fake.dtype.itemsize


def _lower_fixed(builder: PlanBuilder, nodes: Iterable[Node], fixed: set[Node]) -> dict[Node, Known]:
    """What follows from weights and constants alone is computed when the graph is loaded, or now where it is known.

    Returns:
        Constants to which each step writes, as each finds them.
    """
    builder.temporary = "kept"
    begin: dict[Node, Known] = {}
    for node in nodes:
        fake = builder.fake_or_none(node)
        shaped = node.target in SHAPED or node.target in FILLED
        if node.op != "call_function" or node not in builder.live or writes(node) or _is_own(node):
            continue
        if node.target in UNDEFINED:
            continue
        if node in builder.uses.written:  # not known for longer than the first write
            if shaped and fake is not None:
                begin[node] = Known(_filled(node, fake))
            elif not node.all_input_nodes:
                _evaluate(builder, node)
                begin[node] = builder.values.pop(node)
        elif shaped and fake is not None:
            builder.values[node] = Known(_filled(node, fake))
        elif all(isinstance(builder.values.get(source), Known) for source in node.all_input_nodes):
            _evaluate(builder, node)
        elif fake is None or fake.numel() > _MAX_KEPT or not fixed.issuperset(node.all_input_nodes):
            continue
        elif node.target in CONVERSIONS and fake.dtype == builder.fake(node.all_input_nodes[0]).dtype:
            builder.share(node, node.all_input_nodes[0])
        elif not (node.target in VIEWS and _view(builder, node)):
            lower_torch_call(builder, node)
        if node in builder.values:
            fixed.add(node)
    return begin


def _filled(node: Node, fake: Tensor) -> Tensor:
    if node.target in FILLED:
        fill: Any = arguments(node)[-1] if node.target is aten.full_like.default else arguments(node)[2]
        return torch.full(fake.shape, fill, dtype=fake.dtype)
    return SHAPED[node.target](fake.shape, dtype=fake.dtype)


def _evaluate(builder: PlanBuilder, node: Node) -> None:
    """A node whose operands are known."""

    def known(source: Node) -> Any:
        return builder.values[source].tensor

    if node.target is _getitem:
        builder.values[node] = builder.values[arguments(node)[0]][arguments(node)[1]]
        return
    args, kwargs = torch.fx.node.map_arg((arguments(node), node.kwargs), known)
    if not callable(node.target):
        return
    result = node.target(*args, **{name: value for name, value in kwargs.items() if name != "device"})
    if isinstance(result, Tensor):
        builder.values[node] = Known(result)
    elif isinstance(result, list | tuple):
        builder.values[node] = [Known(each) for each in result]


def _getitem(values: Any, index: int) -> Any:
    return values[index]


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
        builder.values[node] = builder.allocate(builder.fake(node).shape, builder.fake(node).dtype)
        return
    if node.target in VIEWS and _view(builder, node):
        return
    lowering = _CALLS.get(node.target)
    if lowering is not None and lowering(builder, node):
        return
    if not lower_elementwise(builder, node):
        lower_torch_call(builder, node)


def _view(builder: PlanBuilder, node: Node) -> bool:
    """A node that looks at its operand's memory; False where it would have to be copied first and cannot be."""
    source = arguments(node)[0]
    if not isinstance(source, Node):
        return False
    value = builder.values[source]
    if isinstance(value, Known) or (node in builder.uses.written and _copies(builder, node, source)):
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
        store(builder, source, copied, copied.layout)
        base, result = copied, _on_layout(builder, node, copied.layout)
        if result is None:
            return False
    if isinstance(result, Tensor):
        builder.values[node] = Stored(base.memory, result)
    else:
        builder.values[node] = [Stored(base.memory, each) for each in result]
    return True


def _copies(builder: PlanBuilder, node: Node, source: Node) -> bool:
    """Whether torch's result has memory of its own, as the strides there are others than in a plan."""
    fake = builder.fake(source)
    layout = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="meta")
    return _on_layout(builder, node, layout) is None


def _keeps_order(builder: PlanBuilder, node: Node, source: Node) -> bool:
    """Whether a view only adds or drops dimensions of size 1."""
    fake = builder.fake_or_none(node)
    if fake is None or node.target in (aten.transpose.int, aten.permute.default, aten.t.default):
        return False
    own = [size for size in fake.shape if size != 1]
    return own == [size for size in builder.fake(source).shape if size != 1] and node.target in (
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.flatten.using_ints,
        aten.unflatten.int,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.expand.default,
    )


def _on_layout(builder: PlanBuilder, node: Node, layout: Tensor) -> Any:
    """The result's layouts within an operand's memory; None where it has memory of its own."""

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
        output = Stored(builder.memory("output", str(index), _bytes(fake)), contiguous(fake.shape, fake.dtype))
        store(builder, node, output, output.layout)
    builder.close_all()
