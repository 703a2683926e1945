# SPDX-License-Identifier: Apache-2.0
"""Parsed graphs as rules see them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
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
    """A parsed graph as rules see it.

    Attributes:
        target: a Neuron target; `hlo` is held to the rules of all of them.
        operators: opcodes that the installed compiler lists, without dashes; None where there is no compiler.
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
        seen, pending = {instruction.id}, [instruction]
        for each in pending:
            path = hlo.module_path(each)
            if path:
                return path
            pending += [user for user in self.users[each.id] if user.id not in seen]
            seen.update(user.id for user in self.users[each.id])
        return ""

    def of(self, *opcodes: str) -> Iterator[Any]:
        """Yield all instructions with one of these opcodes."""
        return (each for each in self.by_id.values() if each.opcode in opcodes)


@dataclass(frozen=True)
class Rule:
    """A rule: its name, the compiler's or runtime's codes for it, and the function that finds the places that break it."""

    name: str
    code: str
    check: Callable[[LintGraph], Iterable[Place]]
