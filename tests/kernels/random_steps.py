# SPDX-License-Identifier: Apache-2.0
"""Random texts cut into the steps of a kernel that keeps a state per slot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random


def steps_of(choose: Random, sizes: Sequence[int]) -> Iterator[list[tuple[int, int | None]]]:
    """Steps that take in texts of so many tokens, in any order and any cut: each a list of a text and its token.

    Among them are idle rows, as None: who runs a step gives them what nobody may see.
    """
    done = [0] * len(sizes)
    while any(begin < size for begin, size in zip(done, sizes, strict=True)):
        places: list[tuple[int, int | None]] = []
        for number in choose.sample(range(len(sizes)), len(sizes)):
            take = choose.randint(0, min(sizes[number] - done[number], 7))
            for place in range(done[number], done[number] + take):
                places += [(number, None)] * (choose.random() < 0.2) + [(number, place)]
            done[number] += take
        if places:
            yield places
