# SPDX-License-Identifier: Apache-2.0
"""In which form a graph's cores add up their sums, read from its HLO, and what both forms cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..graph_io import GraphIO
from ..lowering import hlo
from ..lowering.token_regions import SPLIT, WHOLE, TokenRegions
from ..sdk.hardware import chip_of
from ..sequence_parallel import Exchange, ExchangeForms
from ..sharding.plan import RANK_TENSOR


@dataclass(frozen=True)
class SumCost:
    """The sums of a graph that have a choice, and what follows from them token by token.

    Attributes:
        form: the graph's own.
    """

    form: Literal["whole", "split"]
    forms: ExchangeForms
    ranks: int

    @property
    def both(self) -> tuple[Exchange, Exchange]:
        """Whole, and split."""
        return self.forms.whole, self.forms.split

    def seconds(self, target: str) -> tuple[float, float]:
        """Of both; collectives have their latency, vector engines work at their peak."""
        whole, split = (each.seconds(chip_of(target), self.ranks) for each in self.both)
        return whole, split


def sum_cost(data: bytes, io: GraphIO) -> SumCost | None:
    """None of a graph whose cores cannot split the tokens, would send more bytes that way, or are a single one.

    Raises:
        ValueError: `data` is no HLO module.
    """
    module = hlo.parse(data)
    # Which weights ranks share is not told here: what a rank alone holds meets no whole sum.
    shared = [number for number, each in enumerate(io.inputs) if each.role != "state" and each.name != RANK_TENSOR]
    tokens = TokenRegions(module, io.world_size, shared)
    split = tokens.find(SPLIT)
    regions = split or [each for each in tokens.find(WHOLE) if each.forms.sends_no_more]
    if not regions:
        return None
    return SumCost(
        "split" if split else "whole", sum((each.forms for each in regions), ExchangeForms()), io.world_size
    )
