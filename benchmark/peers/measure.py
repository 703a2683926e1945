# SPDX-License-Identifier: Apache-2.0
"""Runs turns: starts workers, asks them, and notes what they answer. A peer that fails leaves the others as they are."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .names import Peer
from .process import Worker, WorkerError
from .results import FIRST_TOKEN, LOAD, PEAK, Group, agreed
from .schedule import COLD_PROMPT, Case, Prompts, Turn
from .workers.protocol import UnsupportedError


ROOT = Path(__file__).resolve().parents[2]
# Threads of libraries wait awake for more work for up to 0.2 s, on a core that the next worker needs.
SETTLING_S = 0.4
CHECKED_TOKENS = 16


@dataclass(frozen=True)
class Place:
    """Where a peer runs.

    Attributes:
        folder: with what its conversion wrote.
        log: what its worker says.
    """

    peer: Peer
    python: Path
    folder: Path
    log: Path

    def start(self, threads: int) -> Worker:
        """Its worker, which has loaded nothing yet."""
        module, *arguments = self.peer.worker
        command = [str(self.python), "-m", f"benchmark.peers.workers.{module}", *arguments]
        return Worker(self.peer.name, command, worker_variables(self.python, threads), self.log)


def worker_variables(python: Path, threads: int) -> dict[str, str]:
    """The environment variables of a worker: as many threads as all others have, and no network."""
    variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    if python == Path(sys.executable):
        return variables
    variables |= {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    openmp = python.parent.parent / "lib" / "libiomp5.so"  # vLLM's wheel brings it, and is twice as fast with it
    return variables | ({"LD_PRELOAD": str(openmp)} if openmp.is_file() else {})


@dataclass
class Runner:
    """The workers of one model and precision.

    Attributes:
        start: a peer's worker, by name.
        load: arguments of the worker's `load`, by peer.
        checks: prompts, and the reference's greedy tokens behind them.
        advance: told of every turn.
        read_rate: measures the rate at which memory is read, right before a decode step is measured.
    """

    group: Group
    start: Callable[[str], Worker]
    load: dict[str, dict[str, Any]]
    prompts: Prompts
    checks: tuple[Sequence[list[int]], list[list[int]]] = ((), [])
    advance: Callable[[str], None] = lambda text: None
    read_rate: Callable[[], float] | None = None
    settling_s: float = SETTLING_S
    _workers: dict[str, Worker] = field(default_factory=dict)
    _warm: dict[str, set[str]] = field(default_factory=dict)
    _lost: set[str] = field(default_factory=set)

    def run(self, turns: Iterable[Turn]) -> None:
        """Takes all turns; closes every worker, however it ends."""
        try:
            for turn in turns:
                self.advance(f"{turn.peer}: {turn.case.figure if turn.case else 'start'}")
                if turn.peer not in self._lost:
                    self._take(turn)
                if turn.last:
                    self._close(turn.peer)
        finally:
            for peer in list(self._workers):
                self._close(peer)

    def _take(self, turn: Turn) -> None:
        what = turn.case.figure if turn.case else "start"
        try:
            if turn.case is None:
                self._start(turn.peer, turn.round)
            else:
                self._measure(turn.peer, turn.case, turn.round)
        except UnsupportedError as error:
            self.group.explain(turn.peer, f"{what}: {error}")
        except WorkerError as error:
            self.group.explain(turn.peer, f"{what}: {error}")
            if turn.case is None or not error.alive:
                self._lost.add(turn.peer)
                self._close(turn.peer)

    def _start(self, peer: str, number: int) -> None:
        """A fresh process, up to its first token."""
        worker = self._workers[peer] = self.start(peer)
        self._warm[peer] = set()
        self.group.versions[peer] = worker.versions
        loaded = worker.ask("load", **self.load[peer])["seconds"]
        cold = self.prompts.rows(Case("cold", 1, COLD_PROMPT), f"{number} {peer}")
        first = worker.ask("generate", prompts=cold, new_tokens=1)["first_s"]
        self.group.add(LOAD, peer, loaded)
        self.group.add(FIRST_TOKEN, peer, worker.ready_s + loaded + first)
        if peer not in self.group.agreement and self.checks[0]:
            self.group.agreement[peer] = agreed(self.checks[1], greedy(worker, self.checks[0]))

    def _measure(self, peer: str, case: Case, number: int) -> None:
        if case.figure not in self._warm[peer]:  # the first call of its kind compiles, allocates, chooses kernels
            self._ask(peer, case, f"warm {number} {peer}")
            self._warm[peer].add(case.figure)
        read = self.read_rate() if self.read_rate and case.kind == "decode" else None
        time.sleep(self.settling_s)
        self.group.add(case.figure, peer, case.value(self._ask(peer, case, number)))
        if read is not None:
            self.group.add_read(case.figure, peer, read)

    def _ask(self, peer: str, case: Case, when: object) -> dict[str, Any]:
        worker = self._workers[peer]
        if case.kind == "serve":
            requests = self.prompts.requests(case, when)
            answer = worker.ask("serve", requests=requests)
            wanted = sum(new_tokens for _, new_tokens in requests)
            if answer["tokens"] != wanted:
                raise WorkerError(f"{peer} gave {answer['tokens']} new tokens, not {wanted}", alive=True)
            return answer
        rows = self.prompts.rows(case, when)
        return worker.ask("generate", prompts=rows, new_tokens=case.new_tokens)

    def _close(self, peer: str) -> None:
        worker = self._workers.pop(peer, None)
        if worker is None:
            return
        with suppress(OSError):
            if peak := worker.peak_bytes():
                self.group.add(PEAK, peer, peak / 1e6)
        worker.close()


def greedy(worker: Worker, prompts: Sequence[list[int]]) -> list[list[int]]:
    """The first tokens behind each prompt."""
    answers = [worker.ask("generate", prompts=[prompt], new_tokens=CHECKED_TOKENS) for prompt in prompts]
    return [answer["tokens"][0] for answer in answers]
