# SPDX-License-Identifier: Apache-2.0
"""A torch.export program becomes a plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node
from torch.fx.node import map_arg

from ..operators import NAMESPACE
from ..plan import Plan
from ..run.memory import dtype_name
from ..steps.operands import STATES, BufferKind
from . import calls, choose, moves
from .arena import place_buffers
from .builder import PlanBuilder, arguments
from .elementwise import MAPPED, lower_elementwise
from .fusion import REGISTER_DTYPES, KnownValue, Pending, StoredValue, contiguous, squeezed
from .live import leave_out_dead
from .pointwise import ALIASES, FILLED, JOINING, RESHAPES, ROTATE_HALF, SHAPED, UNDEFINED, VIEWS, aten
from .rewrites import drop_writes, find_rotations, lower_rotation
from .spell_out import MAX_KEPT, spell_out
from .whole_numbers import narrow_whole_numbers


_SELECTIONS = (aten.embedding.default, aten.index_select.default, aten.index.Tensor)
_LOWERINGS: dict[Any, Callable[[PlanBuilder, Node], bool]] = {
    **calls.LOWERINGS,
    **dict.fromkeys(_SELECTIONS, moves.lower_select),
    **dict.fromkeys(JOINING, moves.lower_cat),
    aten.repeat_interleave.self_int: moves.lower_repeat,
    aten.repeat.default: moves.lower_tiled,
    aten.copy_.default: moves.lower_copy,
    ROTATE_HALF: lower_rotation,
    **dict.fromkeys(choose.LARGEST, choose.lower_largest),
    aten.gather.default: choose.lower_gather,
    **dict.fromkeys(choose.SCATTERS, choose.lower_scatter),
}
_WITHOUT_EFFECT = ("_assert", "sym_", "_check")


class UnknownOperationError(ValueError):
    """An operator of a graph that a plan cannot have."""


def lower(program: ExportedProgram, tokens: int = 1, by_token: Collection[str] = ()) -> tuple[Plan, dict[str, Tensor]]:
    """Return the plan of a graph, and its constants by name.

    Args:
        program: is changed.
        tokens: of the graph, of which a run can leave out the last.
        by_token: numbers of the outputs that have a row per token; the others are needed whole.

    Raises:
        UnknownOperationError: the graph has an operator that no kernel computes.
    """
    spell_out(program)
    find_rotations(program)
    drop_writes(program, MAPPED | choose.SCATTERS)
    narrow_whole_numbers(program)
    graph = program.graph_module.graph
    writers = [node for node in graph.nodes if node.op == "call_function" and _writes(node) and not _is_own(node)]
    live = _find_live(graph.nodes)
    builder = PlanBuilder(live, writers, MAPPED | {ROTATE_HALF})
    fixed = _add_inputs(builder, program)
    begin = _lower_fixed(builder, graph.nodes, fixed)
    once = tuple(builder.steps)
    builder.steps, builder.temporary = [], "arena"
    for node in graph.nodes:
        if node.op != "call_function" or node not in builder.live:
            continue
        if node in begin:
            builder.values[node] = begin[node]
            if builder.fake(node).dtype not in REGISTER_DTYPES:
                raise UnknownOperationError(
                    f"it writes to numbers of {builder.fake(node).dtype}; export with target='eager'"
                )
            builder.values[node] = builder.contiguous_copy(builder.stored(node))
        elif node not in builder.values:
            _lower_node(builder, node)
    for index, node in enumerate(arguments(graph.output_node())[0]):
        moves.store_value(builder, node, _add_buffer(builder, node, "output", index))
    builder.close_groups()
    plan, constants = place_buffers(builder, once)
    return leave_out_dead(plan, tokens, by_token), constants


def _add_buffer(builder: PlanBuilder, node: Node, kind: BufferKind, number: int) -> StoredValue:
    """Add the buffer of an input or output of the graph."""
    layout = contiguous(builder.fake(node).shape, builder.fake(node).dtype)
    return StoredValue(builder.memory(kind, str(number), layout.nbytes), layout)


def _find_live(nodes: Iterable[Node]) -> set[Node]:
    """Return the nodes that an output or a write needs."""
    live: set[Node] = set()
    for node in reversed(list(nodes)):
        if node.op == "output" or node in live or (node.op == "call_function" and _writes(node)):
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
            builder.values[node] = _add_buffer(builder, node, "input", count)
            count += 1
        elif spec.target is not None and _is_number(program.constants.get(spec.target)):
            builder.values[node] = KnownValue(program.constants[spec.target])
            fixed.add(node)
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) and spec.target is not None:
            layout = _layout_in_torch(builder.fake(node))
            builder.values[node] = StoredValue(builder.memory("tensor", spec.target, layout.nbytes), layout)
            if not spec.target.startswith(STATES):
                fixed.add(node)
        elif spec.target is not None:  # what torch.export lifted out of the model's code
            builder.values[node] = KnownValue(program.constants[spec.target])
            fixed.add(node)
    return fixed


def _is_number(value: Any) -> bool:
    """Return whether a buffer is one whole number, as a scale is."""
    return isinstance(value, Tensor) and value.dtype == torch.int64 and value.numel() == 1


def _layout_in_torch(fake: Tensor) -> Tensor:
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="meta")


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
        if node.op != "call_function" or node not in builder.live or node.target in UNDEFINED:
            continue
        if _writes(node) or _is_own(node):
            continue
        changes, sources = node in builder.written, node.all_input_nodes
        known = None
        if shaped and fake is not None:
            known = KnownValue(_fill_constant(node, fake))
        elif all(isinstance(builder.values.get(source), KnownValue) and not changes for source in sources):
            known = _evaluate_node(builder, node)
        if known is not None:  # of what is written to, for no longer than the first write
            (begin if changes else builder.values)[node] = known
        elif changes or fake is None or fake.numel() > MAX_KEPT or not fixed.issuperset(sources):
            continue
        else:
            _lower_node(builder, node)
        if node in builder.values:
            fixed.add(node)
    builder.close_groups()
    for node, value in builder.values.items():
        if isinstance(value, Pending) and value.home is not None:
            builder.values[node] = builder.resting(node)
    return begin


def _fill_constant(node: Node, fake: Tensor) -> Tensor:
    if node.target in FILLED:
        fill: Any = arguments(node)[-1] if node.target is aten.full_like.default else arguments(node)[2]
        return torch.full(fake.shape, fill, dtype=fake.dtype)
    return SHAPED[node.target](fake.shape, dtype=fake.dtype)


def _evaluate_node(builder: PlanBuilder, node: Node) -> Any:
    """Return the known values of a node, computed from known operands; None where it gives no tensors."""
    args, kwargs = map_arg((arguments(node), node.kwargs), lambda source: builder.values[source].tensor)
    assert callable(node.target)
    result = node.target(*args, **{name: value for name, value in kwargs.items() if name != "device"})
    if isinstance(result, list | tuple):
        return [KnownValue(each) for each in result]
    return KnownValue(result.to(builder.fake(node).dtype)) if isinstance(result, Tensor) else None


def _writes(node: Node) -> bool:
    """Return whether a node writes to the elements of one of its operands."""
    mutable = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
    return mutable and node.target not in ALIASES


def _is_own(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == NAMESPACE


def _lower_node(builder: PlanBuilder, node: Node) -> None:
    name = getattr(node.target, "__name__", str(node.target))
    if name.startswith(_WITHOUT_EFFECT):
        return
    if name == "getitem":
        builder.values[node] = builder.values[arguments(node)[0]][arguments(node)[1]]
        return
    if node.target in ALIASES and not (node.target is aten.dropout.default and arguments(node)[2]):
        builder.share(node, arguments(node)[0])
        return
    if node.target in UNDEFINED:
        builder.values[node] = builder.allocate_like(node)
        return
    if node.target in VIEWS and _lower_view(builder, node):
        return
    lowering = _LOWERINGS.get(node.target)
    if lowering is not None and lowering(builder, node):
        return
    if not lower_elementwise(builder, node):
        fakes = map(builder.fake_or_none, node.all_input_nodes)
        types = ", ".join(dict.fromkeys(dtype_name(fake.dtype) for fake in fakes if fake is not None))
        raise UnknownOperationError(
            f"it calls {node.target} of {types}, which no kernel of the cpu target computes; export with target='eager'"
        )


def _lower_view(builder: PlanBuilder, node: Node) -> bool:
    """Lower a view of an operand's memory; return False where the view needs a copy, and none can be made."""
    source = arguments(node)[0]
    if not isinstance(source, Node):
        return False
    value, fake = builder.values[source], builder.fake(source)
    if isinstance(value, KnownValue):
        return False
    # Torch's result may have memory of its own, which another node writes to.
    apart = node in builder.written and _on_layout(builder, node, _layout_in_torch(fake)) is None
    if isinstance(value, Pending) and not value.group.closed and node.target in RESHAPES and not apart:
        own = builder.fake_or_none(node)
        if own is not None and squeezed(own.shape) == squeezed(fake.shape):
            builder.share(node, source)
            return True
    base = builder.resting(source)
    result = None if apart else _on_layout(builder, node, base.layout)
    if result is None:  # of a copy, which lies in order, there is every view
        if base.layout.dtype not in REGISTER_DTYPES:
            return False
        base = builder.allocate(base.layout.shape, base.layout.dtype)
        moves.store_value(builder, source, base)
        result = _on_layout(builder, node, base.layout)
        if result is None:
            return False
    stored = [StoredValue(base.memory, each) for each in ([result] if isinstance(result, Tensor) else result)]
    builder.values[node] = stored[0] if isinstance(result, Tensor) else stored
    return True


def _on_layout(builder: PlanBuilder, node: Node, layout: Tensor) -> Any:
    """Return the result's layouts within an operand's memory; None where it has memory of its own."""

    def meta(source: Node) -> Tensor:
        return layout if source is arguments(node)[0] else builder.fake(source).to("meta")

    args, kwargs = map_arg((arguments(node), node.kwargs), meta)
    assert callable(node.target)
    try:
        result = node.target(*args, **kwargs)
    except RuntimeError:  # a view that this layout does not have
        return None
    first = result if isinstance(result, Tensor) else result[0]
    return result if first.untyped_storage()._cdata == layout.untyped_storage()._cdata else None
