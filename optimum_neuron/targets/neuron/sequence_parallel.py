# SPDX-License-Identifier: Apache-2.0
"""How cores add up their partial sums: each the whole sum, or each that of a part of the tokens.

Imports no torch. An all-reduce leaves the sum of all tokens on every core, and what follows token by token (the residual stream,
norms) is computed on each of them alike. The other form is a reduce-scatter, which leaves a core its part of the tokens;
these operators on that part alone; and an all-gather where another operator needs all tokens. As an all-reduce is both of
them in one, it exchanges no more bytes, but it is one collective more to wait for.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from .sdk.hardware import Chip
from .sdk.step_times import STEP_TIMES


# Seconds that a collective takes whatever its size, for each doubling of the group: a layer of the published runs, whose latency
# grows with the doublings, has two.
COLLECTIVE_S = STEP_TIMES.layer_s / 2


@dataclass(frozen=True)
class Exchange:
    """What one core does for sums over cores, and for what follows from them token by token.

    Attributes:
        collectives: how many run.
        sent: bytes that the core sends at the least.
        elements: numbers that elementwise operators and reductions take, by the bytes of the widest of their types; types
            are converted, and shapes changed, on the way.
    """

    collectives: int = 0
    sent: int = 0
    elements: Counter[int] = field(default_factory=Counter)

    def __add__(self, other: Exchange) -> Exchange:
        return Exchange(self.collectives + other.collectives, self.sent + other.sent, self.elements + other.elements)

    def seconds(self, chip: Chip, ranks: int) -> float:
        """Latencies of collectives and the vector engines' work at their peak; what bytes take is no part of it."""
        return self.collectives * COLLECTIVE_S * math.log2(ranks) + chip.vector_seconds(self.elements)


@dataclass(frozen=True)
class ExchangeForms:
    """The same sums in both forms."""

    whole: Exchange = Exchange()
    split: Exchange = Exchange()

    def __add__(self, other: ExchangeForms) -> ExchangeForms:
        return ExchangeForms(self.whole + other.whole, self.split + other.split)

    @property
    def sends_no_more(self) -> bool:
        """Whether cores that split the tokens send no more bytes: no bandwidth between cores is known well enough to weigh them."""
        return self.split.sent <= self.whole.sent


def bytes_sent(opcode: str, size: int, ranks: int) -> int:
    """Bytes that each core sends at the least in a collective.

    Args:
        size: bytes of the larger of its operand and its result.
    """
    if opcode == "collective-permute":
        return size
    return size * (ranks - 1) * (2 if opcode == "all-reduce" else 1) // ranks


def forms(sums: Iterable[int], gathered: Iterable[int], elements: Counter[int], ranks: int) -> ExchangeForms:
    """Both forms of some sums.

    Args:
        sums: bytes of each, of all tokens.
        gathered: bytes of each result that is needed of all tokens.
        elements: as in `Exchange`, of all tokens.
    """
    sums, gathered = list(sums), list(gathered)
    whole = Exchange(len(sums), sum(bytes_sent("all-reduce", each, ranks) for each in sums), elements)
    sent = sum(bytes_sent("reduce-scatter", each, ranks) for each in sums)
    sent += sum(bytes_sent("all-gather", each, ranks) for each in gathered)
    parts = Counter({size: count // ranks for size, count in elements.items()})
    return ExchangeForms(whole, Exchange(len(sums) + len(gathered), sent, parts))


def splits(found: ExchangeForms, chip: Chip, ranks: int) -> bool:
    """Whether it takes less time to split the tokens."""
    return found.split.seconds(chip, ranks) < found.whole.seconds(chip, ranks)
