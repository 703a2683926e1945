# SPDX-License-Identifier: Apache-2.0
"""Rules about memory: what a graph shares with the outside, and bytes that it moves without need.

The latter are warnings: such a graph is slow, and compiles. A product takes both of its operands with the dimension that it sums over in
front (on the partitions of SBUF: `nki.isa.nc_matmul` in the SDK's documentation), so a weight is stored with its inputs first. A transpose
in every step costs what reading the weight costs, or more. Codes of weights and caches stay codes until a product takes them: a copy as
numbers is two or four times as large.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from ....step.state_specs import KEPT
from ..graphs import hlo
from ..graphs.io import CACHE
from ..sdk.hardware import CHIPS, GIB, MIB, chip_of
from .graph import LintGraph, Place


def aliases(graph: LintGraph) -> Iterator[Place]:
    """nkipy, core/backend/hlo.py: a parameter is aliased once, an output that is an input needs a copy; EVRF064 of the SDK."""
    parameters = hlo.parameters(graph.module)
    root = graph.by_id[hlo.entry(graph.module).root_id]
    entries = list(graph.module.input_output_alias.entries)
    remedy = "update each state exactly once in a step"
    for number, count in Counter(entry.parameter_number for entry in entries).items():
        if count > 1:
            yield parameters[number], f"{count} outputs share the memory of this input", remedy, "error"
    aliased = {}
    for entry in entries:
        output = graph.by_id[root.operand_ids[entry.output_shape_index[0]]]
        parameter = parameters[entry.parameter_number]
        aliased[parameter.name] = output
        if hlo.array(output.shape) != hlo.array(parameter.shape):
            yield parameter, "its new value has another shape or type", "keep the state's shape and type", "error"
        if entry.kind != hlo.MUST_ALIAS:
            yield parameter, "its new value need not share its memory", "alias it as MUST_ALIAS", "error"
    for operand in root.operand_ids:
        if graph.by_id[operand].opcode == "parameter":
            problem = "an output that is an input needs a copy"
            yield graph.by_id[operand], problem, "leave it out, or update it", "error"
    updated = {each.alias_of for each in graph.io.outputs}
    for binding in graph.io.inputs:
        # A sampler reads what a step left for it, a copy a state or snapshots of it, and it updates the other.
        bare = binding.name.removeprefix(KEPT)
        copied = KEPT + bare if bare == binding.name else bare
        needed = binding.name.startswith((CACHE, KEPT)) and copied not in aliased
        needed = needed or binding.name in updated
        if binding.role == "state" and needed and binding.name not in aliased:
            yield None, f"state {binding.name} is not updated in place", remedy, "error"


def bindings(graph: LintGraph) -> Iterator[Place]:
    """Error code EVRF064 of the SDK; nrt_status.rst, 2: a tensor of another name or size than the NEFF's."""
    found = [(each.name, *hlo.array(each.shape)) for each in hlo.parameters(graph.module)]
    recorded = [(each.name, each.shape, each.dtype) for each in graph.io.inputs]
    for number, (left, right) in enumerate(zip(found, recorded, strict=False)):
        if left != right:
            problem = f"parameter {number} is {left}, its description says {right}"
            yield None, problem, "export the model again", "error"
    root = graph.by_id[hlo.entry(graph.module).root_id]
    for binding, shape in zip(graph.io.outputs, root.shape.tuple_shapes, strict=False):
        if (tuple(shape.dimensions), hlo.dtype_name(shape)) != (binding.shape, binding.dtype):
            problem = f"result {binding.name} is {hlo.dtype_name(shape)}{list(shape.dimensions)}, not {binding.dtype}{list(binding.shape)}"
            yield None, problem, "report it: this is a fault of the lowering", "error"
    if len(found) != len(recorded):
        problem = f"the graph has {len(found)} parameters, its description {len(recorded)}"
        yield None, problem, "export the model again", "error"


def collectives(graph: LintGraph) -> Iterator[Place]:
    """longdct/vllm-neuron: a rank as a trace constant makes a program per rank; all ranks of ours are one group."""
    everyone = [list(range(graph.io.world_size))]
    for each in graph.of("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"):
        groups = [list(group.replica_ids) for group in each.replica_groups]
        if groups != everyone:
            problem = f"replica groups {groups}, for {graph.io.world_size} ranks"
            yield each, problem, "let all ranks take part in one group", "error"
    for each in graph.of("partition-id", "replica-id"):
        yield each, "a rank as part of the program", "pass the rank as a weight", "error"


def memory(graph: LintGraph) -> Iterator[Place]:
    """Error codes EVRF009, EOOM001 and EOOM002 of the SDK: inputs and outputs above what a logical core has."""
    chip = CHIPS.get(graph.target)
    aliased = {entry.output_shape_index[0] for entry in graph.module.input_output_alias.entries}
    results = [shape for index, shape in enumerate(hlo.results(graph.module)) if index not in aliased]
    needed = sum(map(hlo.byte_count, [*(each.shape for each in hlo.parameters(graph.module)), *results]))
    if chip is not None and needed > chip.core_hbm:
        problem = (
            f"{needed / GIB:.1f} GiB of weights, KV cache and results for a core of {chip.core_hbm / GIB:.0f} GiB"
        )
        yield None, problem, "raise --tensor-parallel-size; optimum-cli neuron estimate shows what fits", "error"


LARGEST_COPY = 1 << 20  # bytes: less stays in a core
_CODES = ("int8", "uint8", "float8_e4m3fn")
_ELEMENTWISE = frozenset({"multiply", "add", "subtract", "divide", "negate", "and", "select", "maximum", "compare"})
_SAME_ORDER = frozenset({"reshape", "bitcast", "copy", "convert", "slice", "broadcast", "concatenate"})
_NUMBER_BY_NUMBER = _ELEMENTWISE | _SAME_ORDER


def transposed_weights(graph: LintGraph) -> Iterator[Place]:
    """A weight that a graph transposes, or that a product takes with another dimension in front."""
    weights = set(graph.io.names("weight"))
    remedy = "store it in the order in which the product takes it; optimum-cli export neuron does"
    for each in graph.of("transpose"):
        operand = graph.operands(each)[0]
        name = _find_weight(graph, operand, weights) if changes_order(each, operand) else ""
        if name:
            yield each, f"the weight {name} is transposed in every step", remedy, "warning"
    for each in graph.of("dot"):
        right = graph.operands(each)[1]
        numbers = each.dot_dimension_numbers
        batch, summed = numbers.rhs_batch_dimensions, numbers.rhs_contracting_dimensions
        name = _find_weight(graph, right, weights)
        if name and any(dim not in range(len(batch) + len(summed)) for dim in summed):
            yield each, f"a product sums over dimension {summed[0]} of the weight {name}", remedy, "warning"


def scaled_weights(graph: LintGraph) -> Iterator[Place]:
    """A quantized weight that is multiplied by its scale before a product with fewer numbers to scale, or copied for several readers.

    operators/codes.py counts both forms; that the compiler may keep the copy in memory is reported of int4 weights.
    """
    codes = {each.name for each in graph.io.inputs if each.role == "weight" and each.dtype in _CODES}
    copies: dict[int, set[int]] = defaultdict(set)
    for dot in graph.of("dot"):
        left, right = graph.operands(dot)
        summed = math.prod(right.shape.dimensions[dim] for dim in dot.dot_dimension_numbers.rhs_contracting_dimensions)
        for weight, other in ((left, right), (right, left)):
            cone = list(graph.walk_sources(weight, _NUMBER_BY_NUMBER))
            name = next((each.name for each in cone if each.opcode == "parameter" and each.name in codes), "")
            if not name:
                continue
            batch = math.prod(weight.shape.dimensions[dim] for dim in dot.dot_dimension_numbers.rhs_batch_dimensions)
            rows = math.prod(other.shape.dimensions) // (summed * batch)
            outputs = math.prod(weight.shape.dimensions) // (summed * batch)
            for each in cone:
                scales = _count_scales(graph, each, codes) if each.opcode == "multiply" else 0
                if scales and (scales <= outputs or 2 * rows * scales <= summed * batch * outputs):
                    problem = f"the weight {name} is scaled before a product of {rows} rows"
                    yield each, problem, "scale the product, or that of each group of inputs", "warning"
                if each.opcode == "convert" and hlo.dtype_name(graph.operands(each)[0].shape) in _CODES:
                    copies[each.id].add(dot.id)
    for number, dots in copies.items():
        each = graph.by_id[number]
        if len(dots) > 1 and hlo.byte_count(each.shape) > LARGEST_COPY:
            size = hlo.byte_count(each.shape) / (1 << 20)
            problem = f"{len(dots)} products read one copy of {size:.0f} MiB of a weight's codes"
            yield each, problem, "join them", "warning"


def _count_scales(graph: LintGraph, multiply: Any, codes: set[str]) -> int:
    """Count the scales, which come with the weights, that a weight's codes are multiplied by."""
    sides = graph.operands(multiply)
    cones = [list(graph.walk_sources(side, _NUMBER_BY_NUMBER)) for side in sides]
    coded = [any(each.opcode == "parameter" and each.name in codes for each in cone) for cone in cones]
    if sum(coded) != 1:
        return 0
    scale = sides[coded.index(False)]
    own = set(graph.io.names("weight"))
    if not any(each.opcode == "parameter" and each.name in own for each in cones[coded.index(False)]):
        return 0
    while scale.opcode in ("broadcast", "reshape", "bitcast", "copy", "convert"):
        scale = graph.operands(scale)[0]
    return math.prod(scale.shape.dimensions)


def changes_order(transpose: Any, operand: Any) -> bool:
    """Return whether values change places: not where only dimensions of size 1 do."""
    kept = [dim for dim in transpose.dimensions if operand.shape.dimensions[dim] != 1]
    return kept != sorted(kept) and math.prod(operand.shape.dimensions) > 1


def _find_weight(graph: LintGraph, each: Any, weights: set[str]) -> str:
    """Return the weight that an instruction's result is, or has parts of; empty where it is computed."""
    sources = graph.walk_sources(each, _SAME_ORDER)
    return next((one.name for one in sources if one.opcode == "parameter" and one.name in weights), "")


# What lies between the exponentials of a softmax and the product with values.
_BETWEEN = {"convert", "multiply", "divide", "reshape", "broadcast", "transpose", "bitcast", "copy"}


def attention_scores(graph: LintGraph) -> Iterator[Place]:
    """Weights that a product takes, with the float32 scores that they are made of: no more than a core's own memory.

    What does not fit is written to device memory and read again by each step of a softmax (SBUF sizes: Neuron SDK documentation,
    about-neuron/arch/neuron-hardware).
    """
    limit = chip_of(graph.target).sbuf
    for each in graph.of("exponential"):
        weights = _find_multiplied(graph, each)
        if weights is None:
            continue
        needed = hlo.byte_count(each.shape) + hlo.byte_count(weights.shape)
        if needed > limit:
            problem = f"{needed / MIB:.1f} MiB of attention scores and weights for {limit / MIB:.0f} MiB inside a core"
            yield each, problem, "attend over fewer columns at a time, and merge the results", "warning"


def _find_multiplied(graph: LintGraph, exponentials: Any) -> Any | None:
    """Return the operand of a product that is these exponentials, scaled or not; None where there is none."""

    def keeps_all(user: Any) -> bool:
        same_size = math.prod(user.shape.dimensions) == math.prod(exponentials.shape.dimensions)
        return same_size and user.opcode in _BETWEEN

    uses = graph.walk_uses(exponentials, keeps_all)
    return next((each for each in uses if any(user.opcode == "dot" for user in graph.users[each.id])), None)


_STATE_CODES = ("int8", "float8_e4m3fn")
# A state, and what it becomes by an update in place, as a whole.
_WHOLE = frozenset({"reshape", "bitcast", "copy", "transpose", "scatter", "dynamic-update-slice"})
_PART = frozenset({"slice", "dynamic-slice", "gather", "broadcast"})


def coded_states(graph: LintGraph) -> Iterator[Place]:
    """Codes of a cache that become numbers as a whole, or that another operator than a product reads as numbers."""
    states = {each.name for each in graph.io.inputs if each.role == "state" and each.dtype in _STATE_CODES}
    for each in graph.of("convert"):
        state, is_part = _find_state(graph, graph.operands(each)[0], states)
        if state is None:
            continue
        size = hlo.byte_count(each.shape)
        if not is_part and math.prod(each.shape.dimensions) == math.prod(state.shape.dimensions):
            problem = f"all codes of {state.name} become numbers, {size:,} bytes"
            yield each, problem, "choose what a step attends over first", "warning"
        elif size > LARGEST_COPY and (reader := _find_reader(graph, each)):
            problem = f"{size:,} bytes of numbers that codes of {state.name} stand for are read by {reader}"
            yield each, problem, "let a product take the codes, and scale what it gives", "warning"


def _find_state(graph: LintGraph, each: Any, states: set[str]) -> tuple[Any | None, bool]:
    """Return the state that codes belong to, or None, and whether they are a part of it."""
    is_part = False
    while each.opcode in _WHOLE or each.opcode in _PART:
        is_part = is_part or each.opcode in _PART
        each = graph.operands(each)[0]
    return (each if each.opcode == "parameter" and each.name in states else None), is_part


def _find_reader(graph: LintGraph, numbers: Any) -> str:
    """Return the first operator but products that takes these numbers, wherever they were moved to; empty where there is none."""
    moved = graph.walk_uses(numbers, lambda user: user.opcode in _WHOLE | _PART)
    users = (str(user.opcode) for each in moved for user in graph.users[each.id])
    return next((opcode for opcode in users if opcode not in _WHOLE | _PART | {"dot"}), "")
