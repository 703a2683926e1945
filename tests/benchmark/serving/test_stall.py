# SPDX-License-Identifier: Apache-2.0
"""The options of the serving benchmark."""

from __future__ import annotations

import sys

import pytest

from benchmark.serving import stall


def test_fewer_slots_than_packed_rows_are_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["stall", "--slots", "3"])
    with pytest.raises(SystemExit) as ended:
        stall.parse_arguments()
    said = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2 and "--slots 3" in said and "4 chunk rows" in said and "--scenarios" in said
    monkeypatch.setattr(sys, "argv", ["stall", "--slots", "3", "--scenarios", "stall"])
    assert stall.parse_arguments().slots == 3
