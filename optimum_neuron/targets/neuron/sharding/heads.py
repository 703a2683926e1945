# SPDX-License-Identifier: Apache-2.0
"""Which rank computes which attention heads. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


# Instead of a head's number: a head of zeros.
PADDING = -1


@dataclass(frozen=True)
class HeadLayout:
    """Query and key/value heads by slot: every rank has as many slots as every other.

    Attention code gives consecutive query heads to one key/value head, so all key/value slots have as many query slots.
    A slot may hold padding, a head of zeros that o_proj's zero columns ignore; a key/value head may be in several slots.

    Attributes:
        query, key_value: the head in each slot, or PADDING; one rank's slots after the other's.
    """

    query: tuple[int, ...]
    key_value: tuple[int, ...]
    world_size: int

    @property
    def local_query(self) -> int:
        return len(self.query) // self.world_size

    @property
    def local_key_value(self) -> int:
        return len(self.key_value) // self.world_size


def head_layout(heads: int, kv_heads: int, world_size: int) -> HeadLayout:
    """Gives every query head one slot beside its key/value head.

    A rank gets the fewest key/value slots that hold all of them, since the KV cache grows with them and decoding reads
    it all; then the fewest query slots. So 8 key/value heads on 4 ranks are 2 each, on 16 ranks each is held by two, and
    query heads that do not divide leave padding at the end of their group.

    Raises:
        ValueError: `heads` is no multiple of `kv_heads`.
    """
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads are no multiple of {kv_heads} key/value heads")
    group = heads // kv_heads
    slots = world_size * -(-kv_heads // world_size)
    query_slots = -(-group // (slots // kv_heads))  # per key/value slot
    copies = -(-group // query_slots)
    query: list[int] = []
    key_value: list[int] = []
    for kv_head in range(kv_heads):
        first, end = kv_head * group, (kv_head + 1) * group
        key_value += [kv_head] * copies
        query += [head if head < end else PADDING for head in range(first, first + copies * query_slots)]
    key_value += [PADDING] * (slots - len(key_value))
    query += [PADDING] * (slots * query_slots - len(query))
    return HeadLayout(tuple(query), tuple(key_value), world_size)
