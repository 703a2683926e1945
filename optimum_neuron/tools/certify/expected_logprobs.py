# SPDX-License-Identifier: Apache-2.0
"""What graphs that tell log-probabilities are expected to tell."""

from __future__ import annotations

from collections.abc import Sequence

from ...step.sampling.logprobs import Logprobs, logprobs
from ...step.spec import DECODE
from .expected import STATISTICS, TIMES_ROUNDING, Entry, Expected
from .recording import Step, chosen_tokens
from .reference import Choice, Reference


def expect_logprobs(
    expected: Expected, one: Reference, steps: Sequence[Step], ranks: int, noise: float, count: int
) -> None:
    """Adds those of every decode row in use: of the token that is asked for, and of the `count` most likely ones."""
    for (number, name), choice in one.choices.items():
        if name != f"{DECODE}.tokens":
            continue
        rows, chosen = steps[number].rows[DECODE], chosen_tokens(steps[number])
        found = logprobs(choice.logits, chosen, count)
        for rank in range(ranks):
            place = f"step {number}" + (f" of rank {rank}" if ranks > 1 else "")
            for part, values in ((f"{DECODE}.logprobs", found.chosen), (f"{DECODE}.top_logprobs", found.best)):
                if values.numel():
                    expected.outputs[number, part, rank] = Entry(part, place, values[list(rows)], noise, rows)
        if STATISTICS[expected.dtype] == "largest":
            for row in rows:
                for part, accepted in _accepted(choice, found, row, TIMES_ROUNDING * noise).items():
                    expected.tokens.setdefault((number, f"{DECODE}.{part}"), {})[row] = accepted


def _accepted(choice: Choice, found: Logprobs, row: int, bound: float) -> dict[str, tuple[int, ...]]:
    """The numbers that a row may have where each logit is off by up to `bound`: its token's rank, and the token of each place."""
    each = choice.logits[row].log_softmax(-1)
    first, last = (int((each >= found.chosen[row] + shift).sum()) for shift in (2 * bound, -2 * bound))
    accepted = {"ranks": tuple(range(max(first, 1), last + 1))}
    for place, best in enumerate(found.best[row]):
        near = ((each - best).abs() <= 2 * bound).nonzero().flatten()
        accepted[f"top_tokens.{place}"] = tuple(near.tolist())
    return accepted
