# SPDX-License-Identifier: Apache-2.0
"""benchmark.newcomer, without its downloads: how it ends where a step fails."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmark import newcomer


def test_a_step_that_fails_is_reported_with_the_end_of_what_it_printed(tmp_path: Path) -> None:
    code = "import sys; sys.stderr.write('no such package'); sys.exit(3)"
    with pytest.raises(RuntimeError, match=r"ended with 3: no such package"):
        newcomer.run_command((sys.executable, "-c", code), tmp_path, {})
