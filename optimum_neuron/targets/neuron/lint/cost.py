# SPDX-License-Identifier: Apache-2.0
"""Counts of what a step must move and compute on one core, read from its HLO: a lower bound.

Elementwise operators, slices and reshapes are computed by the operator that takes their result, and a result that the core's own
memory (SBUF) can hold never leaves it. So an operator reads device memory where it needs a weight, a state or a result too large for
the core, and a state that two operators read is read twice.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..graphs import hlo
from ..graphs.io import GraphIO
from ..lowering.kernel_calls import kernel_calls
from ..lowering.split_tokens import bytes_sent
from ..sdk.hardware import CHIPS, chip_of
from .graph import LintGraph
from .memory_rules import changes_order


# Operators that a compiler cannot join with the one that takes their result; all others are computed there.
_KERNELS = frozenset({
    *hlo.COLLECTIVES, "dot", "convolution", "reduce", "reduce-window", "select-and-scatter", "sort", "gather", "scatter",
    "dynamic-slice", "dynamic-update-slice", "custom-call", "transpose", "batch-norm-inference", "reverse", "tuple",
})  # fmt: skip
_RESHAPES = frozenset({"reshape", "bitcast", "copy", "broadcast"})
_UPDATES = frozenset({"scatter", "dynamic-update-slice"})


@dataclass(frozen=True)
class GraphCost:
    """One run of a graph on one core, in bytes of device memory.

    Attributes:
        needed: the least of `read`: each weight, state and input once, as far as any operator looks at it.
        transposed: of weights and states that change the order of their dimensions before a product.
        flops: of matrix products and convolutions, two per multiplication, by torch's name of the operands' type.
        collectives, kernels: runs of each kind, and calls of each kernel of the SDK.
        collective_bytes: that a core sends in them, at the least.
    """

    name: str
    read: int
    needed: int
    written: int
    transposed: int
    flops: dict[str, int]
    collectives: dict[str, int]
    collective_bytes: int
    kernels: dict[str, int]

    @property
    def total_flops(self) -> int:
        return sum(self.flops.values())

    def seconds(self, target: str) -> float:
        """Return the roofline, without the time of collectives and launches; of `hlo` that of the smallest chip."""
        return chip_of(target).core_seconds(self.read + self.written, self.flops)


def graph_cost(name: str, data: bytes, io: GraphIO, target: str) -> GraphCost:
    """Count one graph; on-chip memory is that of its target, or for `hlo` the smallest.

    Raise ValueError where `data` is no HLO module, or multiplies numbers of a type without a known peak.
    """
    return _Counter(LintGraph(name, hlo.parse(data), io, target)).count()


class _Counter:
    """A walk of a graph's entry computation."""

    def __init__(self, graph: LintGraph) -> None:
        self._graph = graph
        self._sbuf = chip_of(graph.target).core_sbuf
        self._entry = hlo.entry(graph.module)
        self._position = {each.id: index for index, each in enumerate(self._entry.instructions)}
        self._in_place = self._updates_in_place()

    def count(self) -> GraphCost:
        graph = self._graph
        reads: dict[int, list[int]] = defaultdict(list)
        written = transposed = moved = 0
        flops: Counter[str] = Counter()
        collectives: Counter[str] = Counter()
        for each in filter(self._is_kernel, self._entry.instructions):
            for source, size in self._find_reads(each):
                reads[source].append(size)
            written += self._written_bytes(each)
            if each.opcode == "transpose":
                transposed += self._count_of_memory(each)
            elif each.opcode in hlo.COLLECTIVES:
                collectives[each.opcode] += 1
                taken = sum(_shape_bytes(part.shape) for part in graph.operands(each))
                moved += bytes_sent(each.opcode, max(_shape_bytes(each.shape), taken), graph.io.world_size)
            # Of a call of a kernel the products of the reference that it names, whatever the kernel leaves out.
            called = each.called_computation_ids if each.opcode == "custom-call" else ()
            for one in (each, *(inner for number in called for inner in graph.computations[number].instructions)):
                if one.opcode in ("dot", "convolution"):
                    flops[self._product_type(one)] += self._count_flops(one)
        return GraphCost(
            name=graph.name,
            read=sum(map(sum, reads.values())),
            needed=sum(
                min(max(sizes), _shape_bytes(graph.by_id[source].shape))
                for source, sizes in reads.items()
                if graph.by_id[source].opcode == "parameter"
            ),
            written=written,
            transposed=transposed,
            flops=dict(flops),
            collectives=dict(collectives),
            collective_bytes=moved,
            kernels=dict(Counter(name for _, name in kernel_calls(graph.module))),
        )

    def _is_source(self, each: Any) -> bool:
        return each.opcode == "parameter" or self._is_kernel(each)

    def _is_kernel(self, each: Any) -> bool:
        if each.opcode == "transpose":
            return changes_order(each, self._graph.operands(each)[0])
        return each.opcode in _KERNELS

    def _find_reads(self, kernel: Any) -> Iterator[tuple[int, int]]:
        """Yield what an operator reads of device memory: the id of a parameter or result, and bytes."""
        for source, count in self._find_sources(kernel):
            where = self._in_place.get(source.id, source.id)
            if source.opcode == "parameter" or where != source.id or _shape_bytes(source.shape) > self._sbuf:
                yield where, count * _element_bytes(source.shape)

    def _find_sources(self, kernel: Any) -> Iterator[tuple[Any, int]]:
        """Yield parameters and results of other operators that one takes, and how many of their elements it can need."""
        limits: dict[int, int] = {}
        found: Counter[int] = Counter()
        pending: list[int] = []

        def visit(each: Any, limit: int) -> None:
            count = min(limit, _count_elements(each.shape))
            if self._is_source(each):
                found[each.id] += count
                return
            if each.id not in limits:
                heapq.heappush(pending, -self._position[each.id])
            limits[each.id] = max(count, limits.get(each.id, 0))

        for operand, count in self._find_needed(kernel):
            source = self._through_reshapes(operand)
            if kernel.opcode == "gather" and self._is_source(source):
                yield source, count  # which may be some rows twice
            else:
                visit(operand, count)
        while pending:  # users before what they use, so that a limit is known in full when it is passed on
            each = self._entry.instructions[-heapq.heappop(pending)]
            for operand in self._graph.operands(each):
                visit(operand, limits[each.id])
        for number, count in found.items():
            source = self._graph.by_id[number]
            yield source, min(count, _count_elements(source.shape))

    def _find_needed(self, kernel: Any) -> Iterator[tuple[Any, int]]:
        """Yield an operator's operands, and how many elements of each it looks at."""
        operands = self._graph.operands(kernel)
        if kernel.opcode == "tuple":
            aliased = {entry.output_shape_index[0] for entry in self._graph.module.input_output_alias.entries}
            for index, operand in enumerate(operands):
                if index not in aliased or self._update_of(operand) is None:
                    yield operand, _count_elements(operand.shape)
            return
        first, *others = operands
        if kernel.opcode in ("gather", "dynamic-slice"):
            yield first, _count_elements(kernel.shape)
        elif kernel.id not in self._in_place:
            yield first, _count_elements(first.shape)
        for operand in others:
            yield operand, _count_elements(operand.shape)

    def _written_bytes(self, kernel: Any) -> int:
        if kernel.id in self._in_place:
            update = self._graph.operands(kernel)[1 if kernel.opcode == "dynamic-update-slice" else 2]
            return _shape_bytes(update.shape)
        if kernel.opcode == "tuple":
            return sum(_shape_bytes(operand.shape) for operand, _ in self._find_needed(kernel))
        size = _shape_bytes(kernel.shape)
        return size if size > self._sbuf else 0

    def _updates_in_place(self) -> dict[int, int]:
        """Return scatters and updates that change a state's own memory, each with that state's parameter."""
        parameters = hlo.parameters(self._graph.module)
        root = self._graph.by_id[self._entry.root_id]
        found: dict[int, int] = {}
        for alias in self._graph.module.input_output_alias.entries:
            chain, update = [], self._update_of(self._graph.operands(root)[alias.output_shape_index[0]])
            while update is not None:
                chain.append(update.id)
                before = self._graph.operands(update)[0]
                update = self._update_of(before)
            if chain and self._through_reshapes(before).id == parameters[alias.parameter_number].id:
                found |= dict.fromkeys(chain, parameters[alias.parameter_number].id)
        return found

    def _update_of(self, each: Any) -> Any | None:
        each = self._through_reshapes(each)
        return each if each.opcode in _UPDATES else None

    def _through_reshapes(self, each: Any) -> Any:
        while each.opcode in _RESHAPES or (each.opcode == "transpose" and not self._is_kernel(each)):
            operand = self._graph.operands(each)[0]
            if _count_elements(operand.shape) != _count_elements(each.shape):
                break
            each = operand
        return each

    def _count_of_memory(self, transpose: Any) -> int:
        """Count the bytes of a weight or a state that a transpose reorders."""
        source = self._through_reshapes(self._graph.operands(transpose)[0])
        while source.opcode in ("slice", "convert"):
            source = self._through_reshapes(self._graph.operands(source)[0])
        held = source.id in self._in_place or source.opcode == "parameter"
        return _count_elements(transpose.shape) * _element_bytes(source.shape) if held else 0

    def _product_type(self, product: Any) -> str:
        name = hlo.dtype_name(self._graph.operands(product)[0].shape)
        if not all(name in chip.flops for chip in CHIPS.values()):
            raise ValueError(f"{self._graph.name}: {product.name} is a product of {name}, for which no peak is known")
        return name

    def _count_flops(self, product: Any) -> int:
        left, right = self._graph.operands(product)
        if product.opcode == "dot":
            dims = product.dot_dimension_numbers.lhs_contracting_dimensions
            terms = math.prod(left.shape.dimensions[dim] for dim in dims)
        else:  # each result is a sum over one filter
            filters = product.convolution_dimension_numbers.kernel_output_feature_dimension
            terms = _count_elements(right.shape) // right.shape.dimensions[filters]
        return 2 * _count_elements(product.shape) * terms


def _count_elements(shape: Any) -> int:
    return math.prod(shape.dimensions)


def _element_bytes(shape: Any) -> int:
    return hlo.byte_count(shape) // max(_count_elements(shape), 1)


def _shape_bytes(shape: Any) -> int:
    return sum(map(_shape_bytes, shape.tuple_shapes)) if shape.tuple_shapes else hlo.byte_count(shape)
