# SPDX-License-Identifier: Apache-2.0
"""The comparison of executed modules with the eager step, within a bound that follows from measured rounding."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .code_steps import as_steps
from .expected import STATISTICS, TIMES_ROUNDING, Expected, summarize
from .host_ranks import RankResults


@dataclass(frozen=True)
class Comparison:
    """All numbers of one subject, compared.

    Attributes:
        subject: the compared output or state, in words.
        dtype: type in which the module was executed.
        place: where the difference is nearest to its bound, or beyond it.
        difference, noise, bound: `noise` is the measured effect of rounding; of tokens, the rows that chose others.
        count: numbers that were compared.
    """

    subject: str
    dtype: str
    place: str
    difference: float
    noise: float
    bound: float
    count: int

    @property
    def holds(self) -> bool:
        """False also for NaN, and where rounding moves numbers without bound, which proves nothing."""
        return self.difference <= self.bound < math.inf

    def __str__(self) -> str:
        if not math.isfinite(self.bound):
            return f"{self.subject} in {self.dtype} cannot be compared at {self.place}, where the eager step makes infinity or NaN"
        return (
            f"{self.subject} in {self.dtype} differ by {self.difference:.2g} from the eager step at {self.place}, where at most "
            f"{self.bound:.2g} is rounding"
        )


def compare(expected: Expected, found: RankResults) -> list[Comparison]:
    """Return one comparison per graph and output, and per kind of state."""
    results: dict[str, Comparison] = {}
    pooled: dict[str, list[Tensor]] = {}
    uses_mean = STATISTICS[expected.dtype] == "mean"
    for (number, name, rank), entry in expected.outputs.items():
        tensor = found[rank][number].get(name)
        nothing = torch.full_like(entry.values, torch.nan, dtype=torch.float32)
        picked = nothing if tensor is None else entry.pick_values(tensor)
        difference = as_steps(picked) - as_steps(entry.values.to(picked.dtype))
        known = results.get(entry.subject)
        if entry.rows is not None and uses_mean:  # a mean over all rows so far replaces the one before
            pooled.setdefault(entry.subject, []).append(difference.flatten())
            difference, known = torch.cat(pooled[entry.subject]), None
        size, bound = summarize(difference, expected.dtype), TIMES_ROUNDING * entry.noise
        one = Comparison(entry.subject, expected.dtype, entry.place, size, entry.noise, bound, difference.numel())
        results[entry.subject] = one if known is None else _keep_worse(known, one)
    return [*results.values(), *_compare_tokens(expected, found)]


def _keep_worse(known: Comparison, one: Comparison) -> Comparison:
    """Return the one nearer to its bound, with the count of both."""
    worse = one if _bound_share(one) > _bound_share(known) else known
    return replace(worse, count=known.count + one.count)


def _bound_share(one: Comparison) -> float:
    if 0 < one.bound < math.inf:
        return one.difference / one.bound
    return 0.0 if one.holds else math.inf


def _compare_tokens(expected: Expected, found: RankResults) -> Iterable[Comparison]:
    wrong: dict[str, list[str]] = {}
    counts: dict[str, int] = {}
    for (number, name), accepted in expected.tokens.items():
        for rank, results in enumerate(found):
            tokens = results[number].get(name)
            for row, allowed in accepted.items():
                counts[name] = counts.get(name, 0) + 1
                if tokens is None or int(tokens[row]) not in allowed:
                    wrong.setdefault(name, []).append(f"step {number}, row {row}, rank {rank}")
    for subject, count in counts.items():
        places = wrong.get(subject, [])
        yield Comparison(subject, expected.dtype, places[0] if places else "", len(places), 0.0, 0.0, count)
