# SPDX-License-Identifier: Apache-2.0
"""Measures systems against each other: one call each in turn, round after round. Knows nothing of what they are."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from optimum_neuron.tools.bench.measure import Spread

from .machine import OtherProcesses
from .systems import OURS, Call, System, compiled_frames, timed_call


@dataclass(frozen=True)
class Speed:
    """One system in one case.

    Attributes:
        ttft_ms: from the call of generate() until every row has its first token.
        prefill_tok_s: prompt tokens of all rows over that time.
        step_ms: mean time of a decode step within a call.
        decode_tok_s_per_row, decode_tok_s: new tokens per second, of a row and of all rows.
        compiled_graphs: graphs that torch.compile made before the rounds, and while they were measured.
    """

    ttft_ms: Spread
    prefill_tok_s: Spread
    step_ms: Spread
    decode_tok_s_per_row: Spread
    decode_tok_s: Spread
    warm_up_s: float
    compiled_graphs: tuple[int, int]


@dataclass(frozen=True)
class Agreement:
    """How many greedy tokens, and whole rows, of a peer are those of this runtime."""

    tokens: int
    equal_tokens: int
    rows: int
    equal_rows: int


@dataclass(frozen=True)
class Case:
    """All systems at one batch size and prompt length.

    Attributes:
        other_cores: cores that other processes kept busy meanwhile; None where the system does not tell.
    """

    batch_size: int
    prompt_length: int
    speeds: dict[str, Speed]
    agreement: dict[str, Agreement]
    other_cores: float | None

    def ratios(self) -> dict[str, dict[str, float]]:
        """This runtime against each peer, by medians; above 1 means that this runtime is faster."""
        ours = self.speeds[OURS]
        return {
            name: {
                "prefill": ours.prefill_tok_s.median / peer.prefill_tok_s.median,
                "decode": ours.decode_tok_s.median / peer.decode_tok_s.median,
            }
            for name, peer in self.speeds.items()
            if name != OURS
        }


def measure_case(
    systems: Sequence[System], prompt_length: int, batch_size: int, new_tokens: int, rounds: int, prompts: PromptSource
) -> Case:
    """Warms every system up with a call of the same shape, then measures them in turn on the same fresh prompts."""
    warm_up, compiled = {}, {}
    for system in systems:
        system.forget_shapes()
    for system in systems:
        before, start = compiled_frames(), time.perf_counter()
        timed_call(system, prompts.draw(batch_size, prompt_length), new_tokens)
        warm_up[system.name], compiled[system.name] = time.perf_counter() - start, compiled_frames() - before
    calls: dict[str, list[Call]] = {system.name: [] for system in systems}
    late = dict.fromkeys(calls, 0)
    others = OtherProcesses()
    for _ in range(rounds):
        fresh = prompts.draw(batch_size, prompt_length)
        for system in systems:
            before = compiled_frames()
            calls[system.name].append(timed_call(system, fresh, new_tokens))
            late[system.name] += compiled_frames() - before
    speeds = {
        name: _speed(of_system, batch_size, prompt_length, warm_up[name], (compiled[name], late[name]))
        for name, of_system in calls.items()
    }
    agreement = {name: agree(calls[OURS], of_peer) for name, of_peer in calls.items() if name != OURS}
    return Case(batch_size, prompt_length, speeds, agreement, others.cores())


def _speed(calls: Sequence[Call], rows: int, prompt_length: int, warm_up: float, compiled: tuple[int, int]) -> Speed:
    return Speed(
        ttft_ms=Spread.of([call.first_token * 1000 for call in calls]),
        prefill_tok_s=Spread.of([rows * prompt_length / call.first_token for call in calls]),
        step_ms=Spread.of([call.step * 1000 for call in calls]),
        decode_tok_s_per_row=Spread.of([1 / call.step for call in calls]),
        decode_tok_s=Spread.of([rows / call.step for call in calls]),
        warm_up_s=warm_up,
        compiled_graphs=compiled,
    )


def agree(ours: Sequence[Call], peer: Sequence[Call]) -> Agreement:
    """Compares the tokens of the same rounds."""
    equal = torch.cat([a.tokens == b.tokens for a, b in zip(ours, peer, strict=True)])
    return Agreement(equal.numel(), int(equal.sum()), len(equal), int(equal.all(dim=1).sum()))


class PromptSource:
    """Random token ids, never the same twice, so that no cache of prefixes can help."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._vocab_size = vocab_size
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self, rows: int, length: int) -> Tensor:
        return torch.randint(0, self._vocab_size, (rows, length), generator=self._generator)
