# SPDX-License-Identifier: Apache-2.0
"""The rule that keys and values which are codes stay codes until a product takes them.

Codes halve or quarter what a step reads of the cache. A copy of them as numbers that is written to memory takes more traffic than a cache of
numbers would: it is written, and read once more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ..lowering import hlo
from .graph import Graph, Place
from .weight_rules import LARGEST_COPY


_CODES = ("int8", "float8_e4m3fn")
# A state, and what it becomes by an update in place, as a whole.
_WHOLE = frozenset({"reshape", "bitcast", "copy", "transpose", "scatter", "dynamic-update-slice"})
_PART = frozenset({"slice", "dynamic-slice", "gather", "broadcast"})


def coded_states(graph: Graph) -> Iterator[Place]:
    """Codes of a cache that become numbers as a whole, or whose numbers another operator than a product reads. A warning: it compiles, and each
    step writes a copy that is two or four times as large as the codes."""
    states = {each.name for each in graph.io.inputs if each.role == "state" and each.dtype in _CODES}
    for each in graph.of("convert"):
        state, is_part = _state(graph, graph.operands(each)[0], states)
        if state is None:
            continue
        size = hlo.byte_count(each.shape)
        if not is_part and math.prod(each.shape.dimensions) == math.prod(state.shape.dimensions):
            problem = f"all codes of {state.name} become numbers, {size:,} bytes"
            yield each, problem, "choose what a step attends over first", "warning"
        elif size > LARGEST_COPY and (reader := _reader(graph, each)):
            problem = f"{size:,} bytes of numbers that codes of {state.name} stand for are read by {reader}"
            yield each, problem, "let a product take the codes, and scale what it gives", "warning"


def _state(graph: Graph, each: Any, states: set[str]) -> tuple[Any | None, bool]:
    """The state that codes are of, and whether they are a part of it; None where they are of none."""
    is_part = False
    while each.opcode in _WHOLE or each.opcode in _PART:
        is_part = is_part or each.opcode in _PART
        each = graph.operands(each)[0]
    return (each if each.opcode == "parameter" and each.name in states else None), is_part


def _reader(graph: Graph, numbers: Any) -> str:
    """The first operator but products that takes these numbers, wherever they were moved to; empty where there is none."""
    pending = [numbers]
    for each in pending:
        for user in graph.users[each.id]:
            if user.opcode in _WHOLE or user.opcode in _PART:
                pending.append(user)
            elif user.opcode != "dot":
                return str(user.opcode)
    return ""
