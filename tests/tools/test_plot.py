# SPDX-License-Identifier: Apache-2.0
"""`--plot` refuses before anything is computed. The commands' own tests draw."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from optimum_neuron.tools.plot import check_plot


def test_a_picture_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"--plot x.png needs matplotlib.*pip install matplotlib"):
        check_plot(Path("x.png"))


def test_a_picture_replaces_no_file(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    check_plot(path)
    path.touch()
    with pytest.raises(FileExistsError, match=r"--plot .*x.png exists already"):
        check_plot(path)
