# SPDX-License-Identifier: Apache-2.0
"""Compares what executed modules make with what the eager step makes, within a bound that follows from measured rounding."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ...step.spec import PROMPT_LOGITS
from ...step.state_sizes import BY_TOKEN
from ...targets.neuron.graph_io import CACHE, SNAPSHOTS
from .code_steps import as_steps
from .expected import STATISTICS, TIMES_ROUNDING, Entry, Expected
from .expected_chosen import expect_chosen
from .expected_logprobs import expect_logprobs
from .host_ranks import Found
from .parts import StateParts, part, places_of, real_heads
from .recording import Step
from .reference import Reference


_COLUMNS, _POSITIONS = 24, 24


@dataclass(frozen=True)
class Comparison:
    """Of all that one subject is compared by.

    Attributes:
        subject: what is compared, in words.
        dtype: in which the module was executed.
        place: where the difference is nearest to its bound, or beyond it.
        difference, noise, bound: `noise` is what rounding was measured to move; of tokens, how many rows chose others.
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
        """False also where the difference is no number, and where rounding moves numbers beyond all bounds, which proves nothing."""
        return self.difference <= self.bound < math.inf

    def __str__(self) -> str:
        if not math.isfinite(self.bound):
            return f"{self.subject} in {self.dtype} cannot be compared at {self.place}, where the eager step makes infinity or NaN"
        return (
            f"{self.subject} in {self.dtype} differ by {self.difference:.2g} from the eager step at {self.place}, where at most "
            f"{self.bound:.2g} is rounding"
        )


def statistic(difference: Tensor, dtype: str) -> float:
    """One number of many; infinite where one of them is no number."""
    if not difference.numel():
        return 0.0
    each = difference.float().abs().nan_to_num(torch.inf, torch.inf, torch.inf)
    return float(each.max() if STATISTICS[dtype] == "largest" else each.mean())


def expect(
    one: Reference,
    moved: Reference,
    steps: Sequence[Step],
    dtype: str,
    ranks: int,
    parts: StateParts | None,
    told: int | None = None,
) -> Expected:
    """What follows from the eager step, once as it is and once moved by rounding.

    Args:
        told: of how many of the most likely tokens a graph tells log-probabilities; None where there is none.
    """
    expected = Expected(dtype)
    noise = _noise_of_logits(one, moved, steps, dtype)
    for (number, name), logits in one.logits.items():
        rows, graph = _rows(steps[number], name), steps[number].graph
        # Of all tokens' logits there are many, and what the first rank returns is all that anybody reads.
        for rank in range(1 if name == PROMPT_LOGITS else ranks):
            place = f"step {number}" + (f" of rank {rank}" if ranks > 1 else "")
            entry = Entry(f"{graph}: {name}", place, logits[list(rows)], noise, rows)
            expected.outputs[number, name, rank] = entry
    if STATISTICS[dtype] == "largest":
        for (number, name), choice in one.choices.items():
            bound = TIMES_ROUNDING * noise
            expected.tokens[number, name] = {row: choice.accepted(row, bound) for row in _rows(steps[number], name)}
        expect_chosen(expected, steps)
    if told is not None:
        expect_logprobs(expected, one, steps, ranks, noise, told)
    for name, state in one.states.items():
        trash = one.trash[name]
        live = len(state) - trash
        moved_by = statistic(as_steps(moved.states[name][:live]) - as_steps(state[:live]), dtype)
        subject = _subject(name)
        for rank in range(ranks):
            places = places_of(parts, name, rank)
            entry = Entry(subject, name, torch.empty(0), moved_by, None, real_heads(places), trash=trash)
            entry.values = entry.pick(part(state, places))
            expected.outputs[len(steps), name, rank] = entry
    return expected


def _subject(state: str) -> str:
    kind = "snapshots" if state.startswith(SNAPSHOTS) else "states"
    return f"{kind}: {state.removeprefix(SNAPSHOTS).removeprefix(CACHE).split('_')[0]}"


def _noise_of_logits(one: Reference, moved: Reference, steps: Sequence[Step], dtype: str) -> float:
    """Over all rows in use, also those of which a graph returns the token alone."""
    pairs = [(number, name, logits, moved.logits[number, name]) for (number, name), logits in one.logits.items()]
    pairs += [(*key, choice.logits, moved.choices[key].logits) for key, choice in one.choices.items()]
    rows = [_difference(found, logits, _rows(steps[number], name)) for number, name, logits, found in pairs]
    return statistic(torch.cat(rows), dtype)


def _difference(found: Tensor, expected: Tensor, rows: tuple[int, ...]) -> Tensor:
    return (found[list(rows)] - expected[list(rows)]).flatten()


def _rows(step: Step, output: str) -> tuple[int, ...]:
    return step.rows[output.split(".")[0]]


def compare(expected: Expected, found: Found) -> list[Comparison]:
    """One comparison per graph and output, and per kind of state."""
    results: dict[str, Comparison] = {}
    pooled: dict[str, list[Tensor]] = {}
    for (number, name, rank), entry in expected.outputs.items():
        tensor = found[rank][number].get(name)
        picked = (
            torch.full_like(entry.values, torch.nan, dtype=torch.float32) if tensor is None else entry.pick(tensor)
        )
        difference = as_steps(picked) - as_steps(entry.values.to(picked.dtype))
        if entry.rows is not None:
            pooled.setdefault(entry.subject, []).append(difference.flatten())
            difference = torch.cat(pooled[entry.subject]) if STATISTICS[expected.dtype] == "mean" else difference
        size, bound = statistic(difference, expected.dtype), TIMES_ROUNDING * entry.noise
        one = Comparison(entry.subject, expected.dtype, entry.place, size, entry.noise, bound, difference.numel())
        results[entry.subject] = _worse(results.get(entry.subject), one, pooled=entry.rows is not None)
    return [*results.values(), *_compare_tokens(expected, found)]


def _worse(known: Comparison | None, one: Comparison, *, pooled: bool) -> Comparison:
    """The one nearer to its bound, with the count of both; a mean over all that came before stands for itself."""
    if known is None or (pooled and STATISTICS[one.dtype] == "mean"):
        return one
    worse = one if _share(one) > _share(known) else known
    return replace(worse, count=known.count + one.count)


def _share(one: Comparison) -> float:
    if 0 < one.bound < math.inf:
        return one.difference / one.bound
    return 0.0 if one.holds else math.inf


def _compare_tokens(expected: Expected, found: Found) -> Iterable[Comparison]:
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


def sampled(expected: Expected, steps: Sequence[Step]) -> Expected:
    """The same with a few numbers of each tensor, half of those of states in columns that steps wrote: a record of it."""
    kept = Expected(expected.dtype, tokens=expected.tokens)
    random = np.random.default_rng(2)
    written = sorted({place for step in steps for place in step.written})
    for key, entry in expected.outputs.items():
        size = entry.values.numel()
        if entry.rows is None:
            positions = _written_positions(key[1], entry.values, written, random)
            positions += random.integers(0, size, _POSITIONS).tolist()
        else:
            positions = random.integers(0, size, min(size, _COLUMNS)).tolist() if size else []
        values = entry.values.flatten().index_select(0, torch.tensor(positions, dtype=torch.int64))  # fp8 has no other
        kept.outputs[key] = replace(entry, values=values, positions=positions)
    return kept


def _written_positions(
    name: str, values: Tensor, written: Sequence[tuple[int, int]], random: np.random.Generator
) -> list[int]:
    """Flat positions in a state `[slots, heads, columns, dim]`, at tokens that were written; none in one without columns."""
    if not name.startswith(BY_TOKEN) or not values.numel():
        return []
    _, heads, columns, dim = values.shape
    places = []
    for index in random.integers(0, len(written), _POSITIONS):
        slot, column = written[index]
        head, offset = int(random.integers(heads)), int(random.integers(dim))
        places.append(((slot * heads + head) * columns + column) * dim + offset)
    return places
