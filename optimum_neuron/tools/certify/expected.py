# SPDX-License-Identifier: Apache-2.0
"""Expected results of executed modules, and how far rounding may move them: both from two runs of the eager step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from ...step.sampling.logprobs import Logprobs, logprobs
from ...step.spec import CHUNK, DECODE, PROMPT_LOGITS
from ...step.state_specs import BY_TOKEN
from ...targets.neuron.graphs.io import CACHE, CHOSEN, SNAPSHOTS
from .code_steps import as_steps
from .parts import StateParts, places_of, real_heads, take_part
from .recording import RecordedStep, chosen_tokens, drawn_name
from .reference import ReferenceRun, SamplerCall


# Factor over the effect of a unit's change in each module's results. Tiny models differ by up to 1.0 times as much; the
# rest is for wide layers: such changes do not cover their sums in another order.
TIMES_ROUNDING = 16.0
# A 16-bit router may choose other experts by rounding, which moves few tokens far: there means are compared.
STATISTICS = {"float32": "largest", "bfloat16": "mean", "float16": "mean"}
# Recorded numbers of an output, and of a state at written columns and again anywhere.
_COLUMNS, _POSITIONS = 24, 24


def summarize(difference: Tensor, dtype: str) -> float:
    """Return the largest or the mean difference; infinity where one is NaN or infinite."""
    if not difference.numel():
        return 0.0
    each = difference.float().abs().nan_to_num(torch.inf, torch.inf, torch.inf)
    return float(each.max() if STATISTICS[dtype] == "largest" else each.mean())


@dataclass
class ExpectedValues:
    """Numbers that are expected of one output or state.

    Attributes:
        rows: compared places of the first dimension; None: all but the last `trash` ones, which take padding.
        heads: compared places of the second dimension; None: all.
        positions: flat places of the compared numbers among these; None: all.
    """

    subject: str
    place: str
    values: Tensor
    noise: float
    rows: tuple[int, ...] | None
    heads: list[int] | None = None
    positions: list[int] | None = None
    trash: int = 1

    def pick_values(self, found: Tensor) -> Tensor:
        """Return the numbers of a result that are compared with `values`."""
        kept = found[: len(found) - self.trash] if self.rows is None else found[list(self.rows)]
        kept = kept if self.heads is None else _select_places(kept, 1, self.heads)
        return kept if self.positions is None else _select_places(kept.flatten(), 0, self.positions)


def _select_places(values: Tensor, dim: int, places: list[int]) -> Tensor:
    """Select also from fp8, which torch does not index by lists."""
    outside = next((place for place in places if not 0 <= place < values.shape[dim]), None)
    if outside is not None:
        raise IndexError(f"place {outside} of {values.shape[dim]}")
    return values.index_select(dim, torch.tensor(places, dtype=torch.int64))


@dataclass
class Expected:
    """Results that executed steps should make.

    Attributes:
        outputs: by number of the step, name of the output and rank; states have the number of steps.
        tokens: of each row in use, those that rounding may choose; empty where they are not compared.
    """

    dtype: str
    outputs: dict[tuple[int, str, int], ExpectedValues] = field(default_factory=dict)
    tokens: dict[tuple[int, str], dict[int, tuple[int, ...]]] = field(default_factory=dict)


def expect_results(
    plain: ReferenceRun,
    moved: ReferenceRun,
    steps: Sequence[RecordedStep],
    dtype: str,
    ranks: int,
    parts: StateParts | None,
    logprobs_count: int | None = None,
) -> Expected:
    """Return the results that follow from the eager step, as it is and moved by rounding.

    Args:
        logprobs_count: number of most likely tokens with log-probabilities; None where no graph returns them.
    """
    expected = Expected(dtype)
    noise = _logits_noise(plain, moved, steps, dtype)
    for (number, name), logits in plain.logits.items():
        rows = _rows_in_use(steps[number], name)
        subject = f"{steps[number].graph}: {name}"
        # All tokens' logits are large, and only the first rank's are read.
        _add_output(expected, number, name, subject, logits, rows, noise, 1 if name == PROMPT_LOGITS else ranks, ranks)
    if STATISTICS[dtype] == "largest":
        for (number, name), choice in plain.choices.items():
            bound, rows = TIMES_ROUNDING * noise, _rows_in_use(steps[number], name)
            expected.tokens[number, name] = {row: choice.accepted_tokens(row, bound) for row in rows}
        _expect_chosen(expected, steps)
    if logprobs_count is not None:
        _expect_logprobs(expected, plain, steps, ranks, noise, logprobs_count)
    for name, state in plain.states.items():
        live = len(state) - plain.trash[name]
        moved_by = summarize(as_steps(moved.states[name][:live]) - as_steps(state[:live]), dtype)
        for rank in range(ranks):
            places = places_of(parts, name, rank)
            entry = ExpectedValues(
                _state_subject(name), name, torch.empty(0), moved_by, None, real_heads(places), trash=plain.trash[name]
            )
            entry.values = entry.pick_values(take_part(state, places))
            expected.outputs[len(steps), name, rank] = entry
    return expected


def _add_output(
    expected: Expected,
    number: int,
    name: str,
    subject: str,
    values: Tensor,
    rows: tuple[int, ...],
    noise: float,
    count: int,
    ranks: int,
) -> None:
    for rank in range(count):
        place = f"step {number}" + (f" of rank {rank}" if ranks > 1 else "")
        expected.outputs[number, name, rank] = ExpectedValues(subject, place, values[list(rows)], noise, rows)


def _state_subject(state: str) -> str:
    kind = "snapshots" if state.startswith(SNAPSHOTS) else "states"
    return f"{kind}: {state.removeprefix(SNAPSHOTS).removeprefix(CACHE).split('_')[0]}"


def _logits_noise(plain: ReferenceRun, moved: ReferenceRun, steps: Sequence[RecordedStep], dtype: str) -> float:
    """Summarize all rows in use, also those of which a graph returns the token alone."""
    pairs = [(number, name, logits, moved.logits[number, name]) for (number, name), logits in plain.logits.items()]
    pairs += [(*key, choice.logits, moved.choices[key].logits) for key, choice in plain.choices.items()]
    differences = []
    for number, name, logits, found in pairs:
        rows = list(_rows_in_use(steps[number], name))
        differences.append((found[rows] - logits[rows]).flatten())
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
                _add_output(expected, number, output, output, values, rows, noise, ranks, ranks)
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


def sample_values(expected: Expected, steps: Sequence[RecordedStep]) -> Expected:
    """Return a few numbers of each tensor for the record, half of those of states in columns that steps wrote."""
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
    """Return flat places of written tokens in a state `[slots, heads, columns, dim]`; none in one without columns."""
    if not name.startswith(BY_TOKEN) or not values.numel():
        return []
    _, heads, columns, dim = values.shape
    places = []
    for index in random.integers(0, len(written), _POSITIONS):
        slot, column = written[index]
        head, offset = int(random.integers(heads)), int(random.integers(dim))
        places.append(((slot * heads + head) * columns + column) * dim + offset)
    return places
