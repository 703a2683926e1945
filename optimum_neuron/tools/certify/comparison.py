# SPDX-License-Identifier: Apache-2.0
"""Expected results of executed modules, and their comparison within bounds: both follow from two runs of the eager step.

The last bit of a number between two codes decides which of them it gets, which moves results further than other rounding does. So
codes of keys and values are compared by their order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...hub.facts import Compared
from ...step.sampling.logprobs import Logprobs, logprobs
from ...step.spec import CHUNK, DECODE, PROMPT_LOGITS
from ...targets.neuron.graphs.io import CHOSEN
from .host_ranks import RankResults
from .recording import RecordedStep, chosen_tokens, drawn_name
from .reference import ReferenceRun, SamplerCall, StateParts, places_of, real_heads, take_part


# Factor over the effect of a unit's change in each module's results. Tiny models differ by up to 1.0 times as much; the
# rest is for wide layers: such changes do not cover their sums in another order.
TIMES_ROUNDING = 16.0
# A 16-bit router may choose other experts by rounding, which moves few tokens far: there means are compared.
STATISTICS = {"float32": "largest", "bfloat16": "mean", "float16": "mean"}


def as_steps(values: Tensor) -> Tensor:
    """Return fp8 codes as float32 in which neighbours differ by 1, with NaN as NaN; other numbers as float32."""
    if values.dtype != torch.float8_e4m3fn:
        return values.float()
    bits = values.contiguous().view(torch.uint8).float()
    size = bits % 128
    return torch.where(size == 127, torch.nan, torch.where(bits < 128, size, -size))


def summarize(difference: Tensor, dtype: str) -> float:
    """Return the largest or the mean difference; infinity where one is NaN or infinite."""
    if not difference.numel():
        return 0.0
    each = difference.float().abs().nan_to_num(torch.inf, torch.inf, torch.inf)
    return float(each.max() if STATISTICS[dtype] == "largest" else each.mean())


@dataclass
class ExpectedValues:
    """Numbers that are expected of one output or state."""

    subject: str
    place: str
    values: Tensor
    noise: float  # how far rounding moves them
    rows: tuple[int, ...] | None  # compared places of the first dimension; None: all but the last `trash`
    heads: list[int] | None = None  # compared places of the second dimension; None: all
    trash: int = 1  # rows that take padding

    def pick_values(self, found: Tensor) -> Tensor:
        kept = found[: len(found) - self.trash] if self.rows is None else found[list(self.rows)]
        # torch does not index fp8 by lists.
        return kept if self.heads is None else kept.index_select(1, torch.tensor(self.heads, dtype=torch.int64))


@dataclass
class Expected:
    """Results that executed steps should make."""

    dtype: str
    # By number of the step, name of the output and rank; states have the number of steps.
    outputs: dict[tuple[int, str, int], ExpectedValues] = field(default_factory=dict)
    # Of each row in use, those that rounding may choose; empty where they are not compared.
    tokens: dict[tuple[int, str], dict[int, tuple[int, ...]]] = field(default_factory=dict)

    def add_output(
        self, number: int, name: str, subject: str, values: Tensor, rows: tuple[int, ...], noise: float, ranks: int
    ) -> None:
        # All tokens' logits are large, and only the first rank's are read.
        for rank in range(1 if name == PROMPT_LOGITS else ranks):
            place = f"step {number}" + (f" of rank {rank}" if ranks > 1 else "")
            self.outputs[number, name, rank] = ExpectedValues(subject, place, values[list(rows)], noise, rows)


def expect_results(
    plain: ReferenceRun,
    moved: ReferenceRun,
    steps: Sequence[RecordedStep],
    dtype: str,
    ranks: int,
    parts: StateParts | None,
    logprobs_count: int | None = None,
) -> Expected:
    """Return the results that follow from the eager step, as it is and moved by rounding."""
    expected = Expected(dtype)
    noise = _measure_noise(plain, moved, steps, dtype)
    for (number, name), logits in plain.logits.items():
        subject = f"{steps[number].graph}: {name}"
        expected.add_output(number, name, subject, logits, _rows_in_use(steps[number], name), noise, ranks)
    if STATISTICS[dtype] == "largest":
        for (number, name), choice in plain.choices.items():
            bound, rows = TIMES_ROUNDING * noise, _rows_in_use(steps[number], name)
            expected.tokens[number, name] = {row: choice.accepted_tokens(row, bound) for row in rows}
        _expect_chosen(expected, steps)
    if logprobs_count is not None:
        _expect_logprobs(expected, plain, steps, ranks, noise, logprobs_count)
    for name, state in plain.states.items():
        live, (*namespaces, own) = len(state) - plain.trash[name], name.split(".")
        subject = f"{'states' if namespaces == ['kv_cache'] else namespaces[0]}: {own.split('_')[0]}"
        moved_by = summarize(as_steps(moved.states[name][:live]) - as_steps(state[:live]), dtype)
        for rank in range(ranks):
            places = places_of(parts, name, rank)
            heads, trash = real_heads(places), plain.trash[name]
            entry = ExpectedValues(subject, name, torch.empty(0), moved_by, None, heads, trash)
            entry.values = entry.pick_values(take_part(state, places))
            expected.outputs[len(steps), name, rank] = entry
    return expected


def _measure_noise(plain: ReferenceRun, moved: ReferenceRun, steps: Sequence[RecordedStep], dtype: str) -> float:
    """Summarize all rows in use, also those of which a graph returns the token alone."""
    pairs = [(key, logits, moved.logits[key]) for key, logits in plain.logits.items()]
    pairs += [(key, choice.logits, moved.choices[key].logits) for key, choice in plain.choices.items()]
    rows = [list(_rows_in_use(steps[number], name)) for (number, name), _, _ in pairs]
    differences = [(two[used] - one[used]).flatten() for used, (_, one, two) in zip(rows, pairs, strict=True)]
    return summarize(torch.cat(differences), dtype)


def _rows_in_use(step: RecordedStep, output: str) -> tuple[int, ...]:
    return step.rows[output.split(".")[0]]


def _expect_chosen(expected: Expected, steps: Sequence[RecordedStep]) -> None:
    """Add the token of each slot after each step: its row's, the last of a prompt, or else the one that it had."""
    for number, step in enumerate(steps):
        if step.kept is None:
            continue
        slots = [(DECODE, row, row) for row in step.rows[DECODE]]
        slots += [(CHUNK, row, int(step.inputs[f"{CHUNK}.seq_ids"][row])) for row in sorted(step.rows[CHUNK])]
        for name_of in (str, drawn_name):
            kept: dict[int, tuple[int, ...]] = {slot: (int(token),) for slot, token in enumerate(step.kept)}
            for group, row, slot in slots:
                kept[slot] = expected.tokens[number, name_of(f"{group}.tokens")][row]
            expected.tokens[number, name_of(CHOSEN)] = kept


def _expect_logprobs(
    expected: Expected, plain: ReferenceRun, steps: Sequence[RecordedStep], ranks: int, noise: float, count: int
) -> None:
    """Add log-probabilities of every decode row in use: of the token that is asked for, and of the `count` most likely."""
    for (number, name), choice in plain.choices.items():
        if name != f"{DECODE}.tokens":
            continue
        rows, chosen = steps[number].rows[DECODE], chosen_tokens(steps[number])
        found = logprobs(choice.logits, chosen, count)
        for output, values in ((f"{DECODE}.logprobs", found.chosen), (f"{DECODE}.top_logprobs", found.best)):
            if values.numel():
                expected.add_output(number, output, output, values, rows, noise, ranks)
        if STATISTICS[expected.dtype] == "largest":
            for row in rows:
                for output, accepted in _accepted_places(choice, found, row, TIMES_ROUNDING * noise).items():
                    expected.tokens.setdefault((number, f"{DECODE}.{output}"), {})[row] = accepted


def _accepted_places(choice: SamplerCall, found: Logprobs, row: int, bound: float) -> dict[str, tuple[int, ...]]:
    """Return what a row may have where each logit is off by up to `bound`: its token's rank, and the token of each place."""
    each = choice.logits[row].log_softmax(-1)
    first, last = (int((each >= found.chosen[row] + shift).sum()) for shift in (2 * bound, -2 * bound))
    accepted = {"ranks": tuple(range(max(first, 1), last + 1))}
    for place, best in enumerate(found.best[row]):
        near = ((each - best).abs() <= 2 * bound).nonzero().flatten()
        accepted[f"top_tokens.{place}"] = tuple(near.tolist())
    return accepted


@dataclass(frozen=True)
class Comparison(Compared):
    """All numbers of one subject, compared where they are nearest to their bound; of tokens, the rows that chose others."""

    @property
    def holds(self) -> bool:
        """False also for NaN, and where rounding moves numbers without bound, which proves nothing."""
        return self.difference <= self.bound < math.inf

    @property
    def share(self) -> float:
        if 0 < self.bound < math.inf:
            return self.difference / self.bound
        return 0.0 if self.holds else math.inf

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
    for (number, name, rank), entry in expected.outputs.items():
        tensor = found[rank][number].get(name)
        nothing = torch.full_like(entry.values, torch.nan, dtype=torch.float32)
        picked = nothing if tensor is None else entry.pick_values(tensor)
        difference = as_steps(picked) - as_steps(entry.values.to(picked.dtype))
        known = results.get(entry.subject)
        if entry.rows is not None and STATISTICS[expected.dtype] == "mean":
            # A mean over all rows so far replaces the one before.
            pooled.setdefault(entry.subject, []).append(difference.flatten())
            difference, known = torch.cat(pooled[entry.subject]), None
        size, bound, count = summarize(difference, expected.dtype), TIMES_ROUNDING * entry.noise, difference.numel()
        one = Comparison(entry.subject, expected.dtype, entry.place, size, bound, count)
        if known is not None:
            one = replace(max(known, one, key=lambda each: each.share), count=known.count + count)
        results[entry.subject] = one
    return [*results.values(), *_compare_tokens(expected, found)]


def _compare_tokens(expected: Expected, found: RankResults) -> Iterator[Comparison]:
    wrong: dict[str, list[str]] = {}
    counts = Counter[str]()
    for (number, name), accepted in expected.tokens.items():
        for rank, results in enumerate(found):
            tokens = results[number].get(name)
            for row, allowed in accepted.items():
                counts[name] += 1
                if tokens is None or int(tokens[row]) not in allowed:
                    wrong.setdefault(name, []).append(f"step {number}, row {row}, rank {rank}")
    for subject, count in counts.items():
        places = wrong.get(subject, [])
        yield Comparison(subject, expected.dtype, places[0] if places else "", len(places), 0.0, count)
