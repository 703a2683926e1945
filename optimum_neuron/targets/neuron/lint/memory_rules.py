# SPDX-License-Identifier: Apache-2.0
"""Rules about memory: what a graph shares with the outside, and bytes that it moves without need.

The latter are warnings: such a graph is slow, and compiles. A product takes both of its operands with the dimension that it sums over in
front (on the partitions of SBUF: `nki.isa.nc_matmul` in the SDK's documentation), so a weight is stored with its inputs first. Codes of
weights and caches stay codes until a product takes them: a copy as numbers is two or four times as large.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from ..graphs import hlo
from ..graphs.io import CACHE, KEEP_STATE, RESTORE_STATE
from ..sdk.hardware import CHIPS, GIB, MIB, chip_of
from .graph import SHAPE_ONLY, LintGraph, Place


def aliases(graph: LintGraph) -> Iterator[Place]:
    """nkipy, core/backend/hlo.py: a parameter is aliased once, an output that is an input needs a copy; EVRF064 of the SDK."""
    parameters = hlo.parameters(graph.module)
    root = graph.by_id[hlo.entry(graph.module).root_id]
    entries = list(graph.module.input_output_alias.entries)
    remedy = "update each state exactly once in a step"
    for number, count in Counter(entry.parameter_number for entry in entries).items():
        if count > 1:
            yield parameters[number], f"{count} outputs share the memory of this input", remedy, "error"
    aliased = set()
    for entry in entries:
        output = graph.by_id[root.operand_ids[entry.output_shape_index[0]]]
        parameter = parameters[entry.parameter_number]
        aliased.add(parameter.name)
        if hlo.array(output.shape) != hlo.array(parameter.shape):
            yield parameter, "its new value has another shape or type", "keep the state's shape and type", "error"
        if entry.kind != hlo.MUST_ALIAS:
            yield parameter, "its new value need not share its memory", "alias it as MUST_ALIAS", "error"
    for operand in root.operand_ids:
        if graph.by_id[operand].opcode == "parameter":
            problem = "an output that is an input needs a copy"
            yield graph.by_id[operand], problem, "leave it out, or update it", "error"
    # A sampler only reads what a step left for it, and a copy of whole rows its source.
    updated = {each.alias_of for each in graph.io.outputs}
    for name in graph.io.names("state"):
        needed = name in updated or (name.startswith(CACHE) and graph.name not in (KEEP_STATE, RESTORE_STATE))
        if needed and name not in aliased:
            yield None, f"state {name} is not updated in place", remedy, "error"


def collectives(graph: LintGraph) -> Iterator[Place]:
    """longdct/vllm-neuron: a rank as a trace constant makes a program per rank; all ranks of ours are one group."""
    everyone = [list(range(graph.io.world_size))]
    for each in graph.of(*hlo.COLLECTIVES):
        groups = [list(group.replica_ids) for group in each.replica_groups]
        if groups != everyone:
            problem = f"replica groups {groups}, for {graph.io.world_size} ranks"
            yield each, problem, "let all ranks take part in one group", "error"
    for each in graph.of("partition-id", "replica-id"):
        yield each, "a rank as part of the program", "pass the rank as a weight", "error"


def order_tokens(graph: LintGraph) -> Iterator[Place]:
    """torch-xla's order of collectives: a number of one's result times zero is added to the next one's operand, and infinity times zero is NaN."""
    for each in graph.of("multiply"):
        left, right = graph.operands(each)
        zeros = [graph.origin(one) for one in (left, right)]
        for factor, other in ((zeros[0], right), (zeros[1], left)):
            if factor.opcode != "constant" or any(hlo.literal_values(factor)):
                continue
            sources = graph.walk_sources(other, _NUMBERS_OF)
            is_result = any(source.opcode in hlo.COLLECTIVES for source in sources)
            if is_result and any(user.opcode in hlo.COLLECTIVES for user in graph.walk_uses(each)):
                problem = (
                    "a collective waits for another one's result times zero, so one row's infinity becomes NaN in all"
                )
                yield each, problem, "leave the product out", "error"


def memory(graph: LintGraph) -> Iterator[Place]:
    """Error codes EVRF009, EOOM001 and EOOM002 of the SDK: inputs and outputs above what a logical core has."""
    chip = chip_of(graph.target) if graph.target in CHIPS else None
    aliased = {entry.output_shape_index[0] for entry in graph.module.input_output_alias.entries}
    results = [shape for index, shape in enumerate(hlo.results(graph.module)) if index not in aliased]
    needed = sum(map(hlo.byte_count, [*(each.shape for each in hlo.parameters(graph.module)), *results]))
    if chip is not None and needed > chip.core_hbm:
        problem = (
            f"{needed / GIB:.1f} GiB of weights, KV cache and results for a core of {chip.core_hbm / GIB:.0f} GiB"
        )
        yield None, problem, "raise --tensor-parallel-size; optimum-cli neuron estimate shows what fits", "error"


# Pass on, or choose, numbers of their operands.
_NUMBERS_OF = SHAPE_ONLY | {"gather", "slice", "dynamic-slice", "get-tuple-element", "multiply"}
_LARGEST_COPY = 1 << 20  # bytes: less stays in a core
_CODES = ("int8", "uint8", "float8_e4m3fn")
_SAME_ORDER = frozenset({"reshape", "bitcast", "copy", "convert", "slice", "broadcast", "concatenate"})
_ELEMENTWISE = frozenset({"multiply", "add", "subtract", "divide", "negate", "and", "maximum"})
# A tensor, and what it becomes by an update in place, as a whole; and a part of it.
_WHOLE = frozenset({"reshape", "bitcast", "copy", "transpose", "scatter", "dynamic-update-slice"})
_PART = frozenset({"slice", "dynamic-slice", "gather", "broadcast"})


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


def copied_codes(graph: LintGraph) -> Iterator[Place]:
    """Codes that become numbers in device memory: of a cache, but for a product; of a weight, for several (seen of int4 weights)."""
    roles = {each.name: each.role for each in graph.io.inputs if each.dtype in _CODES}
    for each in graph.of("convert"):
        source, is_part = graph.operands(each)[0], False
        while source.opcode in _WHOLE | _PART | _ELEMENTWISE:
            is_part = is_part or source.opcode in _PART
            source = graph.operands(source)[0]
        role = roles.get(source.name) if source.opcode == "parameter" else None
        size = hlo.byte_count(each.shape)
        if role == "state" and not is_part and math.prod(each.shape.dimensions) == math.prod(source.shape.dimensions):
            problem = f"all codes of {source.name} become numbers, {size:,} bytes"
            yield each, problem, "choose what a step attends over first", "warning"
        elif role is not None and size > _LARGEST_COPY:
            opcodes = _list_readers(graph, each, _WHOLE | _PART | (_ELEMENTWISE if role == "weight" else frozenset()))
            others = [opcode for opcode in opcodes if opcode != "dot"]
            if role == "state" and others:
                problem = f"{size:,} bytes of numbers that codes of {source.name} stand for are read by {others[0]}"
                yield each, problem, "let a product take the codes, and scale what it gives", "warning"
            if role == "weight" and len(opcodes) - len(others) > 1:
                problem = f"{len(opcodes) - len(others)} products read one copy of {size:,} bytes of the codes of {source.name}"
                yield each, problem, "join them", "warning"


def _list_readers(graph: LintGraph, numbers: Any, through: frozenset[str]) -> list[str]:
    """Return the opcodes of what takes these numbers, wherever operators in `through` move them."""
    moved = graph.walk_uses(numbers, lambda user: user.opcode in through)
    readers = {user.id: str(user.opcode) for each in moved for user in graph.users[each.id]}
    return [opcode for opcode in readers.values() if opcode not in through]


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

        def keeps_all(user: Any, count: int = math.prod(each.shape.dimensions)) -> bool:
            return user.opcode in _BETWEEN and math.prod(user.shape.dimensions) == count

        taken = (
            one
            for one in graph.walk_uses(each, keeps_all)
            if any(user.opcode == "dot" for user in graph.users[one.id])
        )
        weights = next(taken, None)
        needed = 0 if weights is None else hlo.byte_count(each.shape) + hlo.byte_count(weights.shape)
        if needed > limit:
            problem = f"{needed / MIB:.1f} MiB of attention scores and weights for {limit / MIB:.0f} MiB inside a core"
            yield each, problem, "attend over fewer columns at a time, and merge the results", "warning"
