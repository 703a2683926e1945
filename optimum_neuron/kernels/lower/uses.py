# SPDX-License-Identifier: Apache-2.0
"""Who takes the values of a graph's nodes, which decides in which type they are kept.

Between two Maps a number of bfloat16 or float16 stays in float32, in registers and in memory alike, and is rounded where a kernel or
torch takes it. So what is rounded does not depend on which operators share a Map.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

import torch
from torch.fx import Node

from .pointwise import ALIASES, JOINING, MAPPED, VIEWS


_FEWER_BITS = (torch.bfloat16, torch.float16)


class Uses:
    """What becomes of values.

    Attributes:
        written: nodes to whose memory an operator of torch writes: they are in their own type there, and in registers rounded to it.
    """

    def __init__(self, live: set[Node], writers: Iterable[Node]) -> None:
        self._live = live
        self.written: set[Node] = set()
        for writer in writers:
            node = writer.args[0]
            while isinstance(node, Node) and node not in self.written:
                self.written.add(node)
                same = node.target in VIEWS or node.target in ALIASES
                node = node.args[0] if same else None

    def are_wide(self, node: Node, seen: Container[Node]) -> bool:
        """Whether a node's value is kept in float32, for a Map that is still to come, though its type has fewer bits.

        Args:
            seen: nodes that have been lowered already.
        """
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dtype not in _FEWER_BITS or node in self.written:
            return False
        return any(self._is_for_maps(user, seen) for user in node.users if user in self._live and user not in seen)

    def _is_for_maps(self, user: Node, seen: Container[Node]) -> bool:
        if user.op == "output" or user.target in MAPPED:
            return True
        if user.target in VIEWS or user.target in ALIASES or user.target in JOINING or _is_item(user):
            return any(self._is_for_maps(each, seen) for each in user.users if each in self._live)
        return False


def _is_item(user: Node) -> bool:
    return getattr(user.target, "__name__", "") == "getitem"
