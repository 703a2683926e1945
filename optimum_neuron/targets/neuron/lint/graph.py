# SPDX-License-Identifier: Apache-2.0
"""Parsed graphs as rules see them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from ..graphs import hlo
from ..graphs.io import GraphIO


Severity = Literal["error", "warning"]
INTEGERS = {"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"}
# What changes how numbers lie, or their type, and not which they are.
SHAPE_ONLY = {"reshape", "broadcast", "convert", "copy", "transpose", "bitcast"}
# The instruction (None for the graph as a whole), problem, remedy and severity of a finding.
Place = tuple[Any, str, str, Severity]


@dataclass
class LintGraph:
    """A parsed graph as rules see it. The target `hlo` is held to the rules of all Neuron targets.

    `operators` are opcodes that the installed compiler lists, without dashes; None where there is no compiler.
    """

    name: str
    module: Any
    io: GraphIO
    target: str
    operators: frozenset[str] | None = None
    by_id: dict[int, Any] = field(init=False)
    users: dict[int, list[Any]] = field(init=False)
    computations: dict[int, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.by_id = {each.id: each for _, each in hlo.instructions(self.module)}
        self.computations = {each.id: each for each in self.module.computations}
        self.users = defaultdict(list)
        for instruction in self.by_id.values():
            for operand in instruction.operand_ids:
                self.users[operand].append(instruction)

    def operands(self, instruction: Any) -> list[Any]:
        return [self.by_id[operand] for operand in instruction.operand_ids]

    def origin(self, instruction: Any) -> Any:
        """Return the source of an instruction's numbers, through what only moves them."""
        while instruction.opcode in SHAPE_ONLY:
            instruction = self.operands(instruction)[0]
        return instruction

    def module_path(self, instruction: Any) -> str:
        """Return the module that an instruction comes from, or where torch-xla did not note it, one that uses its result."""
        return next(filter(None, map(hlo.module_path, self.walk_uses(instruction))), "")

    def walk_sources(self, instruction: Any, through: Collection[str]) -> Iterator[Any]:
        """Yield an instruction, and what it is made of through these opcodes, each once."""
        return _walk(instruction, lambda each: self.operands(each) if each.opcode in through else [])

    def walk_uses(self, instruction: Any, through: Callable[[Any], bool] = lambda user: True) -> Iterator[Any]:
        """Yield an instruction, and what uses its result, as far as it is let through, each once."""
        return _walk(instruction, lambda each: filter(through, self.users[each.id]))

    def of(self, *opcodes: str) -> Iterator[Any]:
        """Yield all instructions with one of these opcodes."""
        return (each for each in self.by_id.values() if each.opcode in opcodes)


def _walk(start: Any, find_next: Callable[[Any], Iterable[Any]]) -> Iterator[Any]:
    found, pending = {start.id}, [start]
    for each in pending:
        yield each
        for one in find_next(each):
            if one.id not in found:
                found.add(one.id)
                pending.append(one)
