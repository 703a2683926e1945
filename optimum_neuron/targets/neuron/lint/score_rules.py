# SPDX-License-Identifier: Apache-2.0
"""The rule about attention's scores: what of them exists at once fits the memory inside a core."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ..lowering import hlo
from ..sdk.hardware import MIB, chip_of
from .graph import Graph, Place


# What lies between the exponentials of a softmax and the product with values.
_BETWEEN = {"convert", "multiply", "divide", "reshape", "broadcast", "transpose", "bitcast", "copy"}


def scores(graph: Graph) -> Iterator[Place]:
    """Weights that a product takes, with the float32 scores that they are made of: no more than a core's own memory.

    What does not fit is written to device memory and read again by each of a softmax's steps. A warning: it is slow, and
    compiles (SBUF sizes: Neuron SDK documentation, about-neuron/arch/neuron-hardware).
    """
    limit = chip_of(graph.target).sbuf
    for each in graph.of("exponential"):
        weights = _multiplied(graph, each)
        if weights is None:
            continue
        needed = hlo.byte_count(each.shape) + hlo.byte_count(weights.shape)
        if needed > limit:
            problem = f"{needed / MIB:.1f} MiB of attention scores and weights for {limit / MIB:.0f} MiB inside a core"
            yield each, problem, "attend over fewer columns at a time, and merge the results", "warning"


def _multiplied(graph: Graph, exponentials: Any) -> Any | None:
    """The operand of a product that is these exponentials, scaled or not, if there is one."""
    count = math.prod(exponentials.shape.dimensions)
    pending, seen = [exponentials], {exponentials.id}
    for each in pending:
        for user in graph.users[each.id]:
            if user.opcode == "dot":
                return each
            same_size = math.prod(user.shape.dimensions) == count
            if user.opcode in _BETWEEN and same_size and user.id not in seen:
                seen.add(user.id)
                pending.append(user)
    return None
