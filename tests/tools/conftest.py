# SPDX-License-Identifier: Apache-2.0
"""The command line of the tools, in this process."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from helpers import Cli
from optimum.commands import optimum_cli


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run `optimum-cli`; return its exit code, and what it prints to stdout and to stderr."""

    def run(*words: object) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["optimum-cli", *map(str, words)])
        code: Any = 0
        try:
            optimum_cli.main()
        except SystemExit as ended:
            code = ended.code
        return code, *capsys.readouterr()

    return run
