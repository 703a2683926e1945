# SPDX-License-Identifier: Apache-2.0
"""The machine's limits: what is quick is tried several times, what is slow once."""

from __future__ import annotations

from itertools import count

import pytest

from benchmark import machine


@pytest.mark.parametrize(("seconds", "tries"), [(0.001, machine.REPEATS), (2.0, 3), (60.0, 1)])
def test_what_takes_long_is_not_tried_again(monkeypatch: pytest.MonkeyPatch, seconds: float, tries: int) -> None:
    calls: list[None] = []
    ticks = count()
    # Asked before and after each try.
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(ticks) * seconds)
    assert machine._fastest(lambda: calls.append(None)) == pytest.approx(seconds)
    assert len(calls) == tries
