# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the writer's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from optimum_neuron.artifact import writer


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out" / "artifact"


@pytest.fixture(params=[True, False], ids=["exchange", "two-renames"])
def protocol(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """With a file system that swaps folders in one step, and with one that does not."""
    if not request.param:
        monkeypatch.setattr(writer, "exchange", lambda left, right: False)
    return request.param
