# SPDX-License-Identifier: Apache-2.0
"""What is measured, and in which order: all runtimes in turn, round after round. Runs nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


DECODE_CONTEXT, DECODE_STEPS = 256, 24
SERVED_PROMPTS, SERVED_NEW_TOKENS = (16, 384), (16, 64)
COLD_PROMPT = 128

Request = tuple[list[int], int]


@dataclass(frozen=True)
class Case:
    """One thing to measure.

    Attributes:
        kind: "prefill", "decode" or "serve".
        rows: prompts, or requests.
        prompt: tokens of each prompt; 0 where lengths are mixed.
        new_tokens: of each row; 0 where they are mixed.
    """

    kind: str
    rows: int
    prompt: int = 0
    new_tokens: int = 0

    @property
    def figure(self) -> str:
        """What it gives."""
        if self.kind == "prefill":
            return f"prefill {self.prompt:,}, tok/s"
        return f"decode x {self.rows}, ms/step" if self.kind == "decode" else f"{self.rows} requests, new tok/s"

    def value(self, answer: dict[str, float]) -> float:
        """The figure, from a worker's answer."""
        if self.kind == "prefill":
            return self.rows * self.prompt / answer["first_s"]
        if self.kind == "decode":
            return 1e3 * answer["rest_s"] / (self.new_tokens - 1)
        return answer["tokens"] / answer["seconds"]


def cases(prompts: Sequence[int], batches: Sequence[int], requests: int) -> list[Case]:
    """All cases of a run."""
    prefill = [Case("prefill", 1, prompt, 1) for prompt in prompts]
    decode = [Case("decode", rows, DECODE_CONTEXT - DECODE_STEPS, DECODE_STEPS) for rows in batches]
    return [*prefill, *decode, Case("serve", requests)]


def longest_row(prompts: Sequence[int], batches: Sequence[int]) -> int:
    """Tokens that a row of any case can have, with what rows that begin early are ahead of others; in whole blocks of 256."""
    served = SERVED_PROMPTS[1] + SERVED_NEW_TOKENS[1]
    longest = max(max(prompts) + 1, COLD_PROMPT + 1, DECODE_CONTEXT + 2 * max(batches), served)
    return -(-longest // 256) * 256


@dataclass(frozen=True)
class Turn:
    """A runtime's turn in a round.

    Attributes:
        case: None: its worker is started anew, and gives its first token.
        last: its worker is not needed any more.
    """

    round: int
    peer: str
    case: Case | None
    last: bool


def turns(peers: Sequence[str], cases: Sequence[Case], rounds: int, together: bool) -> Iterator[Turn]:
    """Rounds of all peers; another peer begins each round.

    Args:
        together: all workers live at once, so that peers take turns case by case; otherwise one lives at a time, and goes
            through all cases before the next one starts.
    """
    for number in range(rounds):
        for peer in _from(peers, number):
            alone = not together and not cases
            yield Turn(number, peer, None, last=alone or (together and number < rounds - 1))
            for place, case in enumerate(() if together else cases):
                yield Turn(number, peer, case, last=place == len(cases) - 1)
    for place, case in enumerate(cases if together else ()):
        for number in range(rounds):
            final = place == len(cases) - 1 and number == rounds - 1
            for peer in _from(peers, number):
                yield Turn(number, peer, case, last=final)


def _from(peers: Sequence[str], first: int) -> list[str]:
    first %= len(peers)
    return [*peers[first:], *peers[:first]]


class Prompts:
    """Random token ids: the same for all peers in a round of a case, and never the same again."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._vocab_size, self._seed = vocab_size, seed

    def rows(self, case: Case, when: object) -> list[list[int]]:
        source = self._source(case, when)
        return [self._draw(source, case.prompt) for _ in range(case.rows)]

    def requests(self, case: Case, when: object) -> list[Request]:
        source = self._source(case, when)
        lengths = [(source.randint(*SERVED_PROMPTS), source.randint(*SERVED_NEW_TOKENS)) for _ in range(case.rows)]
        return [(self._draw(source, prompt), new_tokens) for prompt, new_tokens in lengths]

    def _source(self, case: Case, when: object) -> random.Random:
        return random.Random(f"{self._seed} {when} {case}")

    def _draw(self, source: random.Random, length: int) -> list[int]:
        return [source.randrange(self._vocab_size) for _ in range(length)]
