# SPDX-License-Identifier: Apache-2.0
"""Measures one model in one precision: all runtimes in turn, round after round. A peer that fails leaves the others as they are."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .process import Place, Worker, WorkerError
from .results import COLD_PROMPT, FIRST_TOKEN, LOAD, PEAK, Case, Group, Prompts, agreed
from .workers.protocol import UnsupportedError


# Threads of libraries wait awake for more work for up to 0.2 s, on a core that the next worker needs.
SETTLING_S = 0.4
CHECKED_TOKENS = 16


@dataclass
class Runner:
    """The workers of one model and precision.

    Attributes:
        places: where each peer runs, by name.
        checks: prompts, and the reference's greedy tokens after them.
        advance: called before every turn.
        read_rate: measures the rate at which memory is read, right before a decode step is measured.
    """

    group: Group
    places: Mapping[str, Place]
    prompts: Prompts
    checks: tuple[Sequence[list[int]], list[list[int]]] = ((), [])
    advance: Callable[[str], None] = lambda text: None
    read_rate: Callable[[], float] | None = None
    settling_s: float = SETTLING_S
    _workers: dict[str, Worker] = field(default_factory=dict)
    _warm: set[tuple[Worker, Case]] = field(default_factory=set)
    _lost: set[str] = field(default_factory=set)

    def run_rounds(self, rounds: int, *, together: bool) -> None:
        """Take all turns; another peer begins each round. Close every worker, however it ends.

        Args:
            together: all workers live at once, so that peers take turns case by case. Otherwise one lives at a time, and goes
                through all cases before the next one starts.
        """
        cases, peers = self.group.cases, list(self.places)

        def in_turn(number: int) -> list[str]:
            first = number % len(peers)
            return [*peers[first:], *peers[:first]]

        try:
            for number in range(rounds):
                for peer in in_turn(number):
                    self._take(peer, "start", self._start, peer, number)
                    for case in () if together else cases:
                        self._take(peer, case.figure, self._measure, peer, case, number)
                    if not together or number < rounds - 1:
                        self._close(peer)
            for case in cases if together else ():
                for number in range(rounds):
                    for peer in in_turn(number):
                        self._take(peer, case.figure, self._measure, peer, case, number)
        finally:
            for peer in list(self._workers):
                self._close(peer)

    def _take(self, peer: str, what: str, turn: Callable[..., None], *arguments: object) -> None:
        self.advance(f"{peer}: {what}")
        if peer in self._lost:
            return
        try:
            turn(*arguments)
        except UnsupportedError as error:
            self.group.explain(peer, f"{what}: {error}")
        except WorkerError as error:
            self.group.explain(peer, f"{what}: {error}")
            if turn == self._start or not error.alive:
                self._lost.add(peer)
                self._close(peer)

    def _start(self, peer: str, number: int) -> None:
        """Start a fresh process, up to its first token."""
        worker = self._workers[peer] = self.places[peer].start()
        self.group.versions[peer] = worker.versions
        loaded = worker.ask("load", **self.places[peer].loading)["seconds"]
        cold = self.prompts.rows(Case("cold", 1, COLD_PROMPT), f"{number} {peer}")
        first = worker.ask("generate", prompts=cold, new_tokens=1)["first_s"]
        self.group.add(LOAD, peer, loaded)
        self.group.add(FIRST_TOKEN, peer, worker.ready_s + loaded + first)
        if peer not in self.group.agreement and self.checks[0]:
            self.group.agreement[peer] = agreed(self.checks[1], greedy(worker, self.checks[0]))

    def _measure(self, peer: str, case: Case, number: int) -> None:
        worker = self._workers[peer]
        if (worker, case) not in self._warm:  # the first call of its kind compiles, allocates, chooses kernels
            self._ask(worker, case, f"warm {number} {peer}")
            self._warm.add((worker, case))
        read = self.read_rate() if self.read_rate and case.kind == "decode" else None
        time.sleep(self.settling_s)
        self.group.add(case.figure, peer, case.value(self._ask(worker, case, number)), read)

    def _ask(self, worker: Worker, case: Case, when: object) -> dict[str, Any]:
        if case.kind != "serve":
            return worker.ask("generate", prompts=self.prompts.rows(case, when), new_tokens=case.new_tokens)
        requests = self.prompts.requests(case, when)
        answer = worker.ask("serve", requests=requests)
        wanted = sum(new_tokens for _, new_tokens in requests)
        if answer["tokens"] != wanted:
            raise WorkerError(f"{worker.name} gave {answer['tokens']} new tokens, not {wanted}", alive=True)
        return answer

    def _close(self, peer: str) -> None:
        worker = self._workers.pop(peer, None)
        if worker is None:
            return
        if peak := worker.peak_bytes():
            self.group.add(PEAK, peer, peak / 1e6)
        worker.close()


def greedy(worker: Worker, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Return the first tokens after each prompt."""
    answers = [worker.ask("generate", prompts=[prompt], new_tokens=CHECKED_TOKENS) for prompt in prompts]
    return [answer["tokens"][0] for answer in answers]
