# SPDX-License-Identifier: Apache-2.0
"""The script that compiles modules where neuronx-cc is, by a stand-in for it, and the table of its result."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from optimum_neuron.tools.golden import run_compiler
from optimum_neuron.tools.golden.read import print_result, read_result


COMPILER = """\
#!/bin/sh
[ "$1" = --version ] && { echo "NeuronX Compiler version 2.27.5334.0"; exit 0; }
echo "$2" >> "$CALLS"
case "$2" in
  bad*) printf 'ERROR: [NCC_EVRF029] [red]\\033[31m sort'; exit 70 ;;
  slow*) sleep 60 ;;
  *) head -c 2000 /dev/zero > "${2%.hlo}.neff"; echo "Total instructions: 12" ;;
esac
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., str]:
    """Run the script, in a folder of three modules as `write_golden` makes it; return what it writes to stderr."""
    modules = {}
    for name in ("good", "bad", "slow"):
        (tmp_path / f"{name}.hlo").write_bytes(name.encode())
        described = {"file": f"{name}.hlo", "neff": f"{name}.neff", "arguments": ["compile", f"{name}.hlo"]}
        modules[name] = described | {"sha256": hashlib.sha256(name.encode()).hexdigest()}
    (tmp_path / "modules.json").write_text(json.dumps({"modules": modules}))
    script, compiler = shutil.copy(run_compiler.__file__, tmp_path), tmp_path / "bin/neuronx-cc"
    compiler.parent.mkdir()
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    variables = {**os.environ, "PATH": f"{compiler.parent}:{os.environ['PATH']}", "CALLS": str(tmp_path / "calls")}

    def run(*options: str) -> str:
        command = [sys.executable, "-I", script, *options]
        return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False).stderr

    return run


def test_each_outcome_is_recorded_and_shown_and_a_second_run_continues(
    run: Callable[..., str], tmp_path: Path
) -> None:
    assert not run("--minutes", "0.02")
    result, console = read_result(tmp_path / "result.json"), Console(width=200)
    outcomes = {name: each["outcome"] for name, each in result["modules"].items()}
    assert outcomes == {"good": "compiled", "bad": "failed", "slow": "timeout"}
    with console.capture() as text:
        print_result(result, console)
    for part in ("NCC_EVRF029: a sort is", "[red]", "Total instructions: 12", "1 of 3 modules compile; not tried: "):
        assert part in text.get()
    assert "\x1b[31m" not in text.get()
    del result["modules"]["bad"]
    (tmp_path / "result.json").write_text(json.dumps(result))
    assert not run()
    assert (tmp_path / "calls").read_text().split() == ["good.hlo", "bad.hlo", "slow.hlo", "bad.hlo"]


def test_changed_files_and_unknown_modules_are_refused(run: Callable[..., str], tmp_path: Path) -> None:
    assert "there is no module worse" in run("--only", "worse")
    (tmp_path / "good.hlo").write_bytes(b"else")
    assert "good.hlo is not the file that was written here" in run()
    assert not (tmp_path / "result.json").exists()


@pytest.mark.parametrize(
    "change", [{"compiler": "\x1b[2J"}, {"format": 2}, {"modules": {"x": {}}}, {"host": 1}, {"more": 1}]
)
def test_a_result_that_says_other_things_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"format": 1, "compiler": "2.27", "host": "x86", "modules": {}} | change))
    with pytest.raises(ValueError, match=r"is no result of run_compiler\.py: "):
        read_result(path)
