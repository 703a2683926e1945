# SPDX-License-Identifier: Apache-2.0
"""The machine that is measured on: what it is and has, and whether others use it meanwhile. Imports torch late."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from .output import warn


# Cores that other processes may keep busy before a number is worth a warning.
IDLE_LIMIT = 0.1


def describe_machine() -> dict[str, Any]:
    """What the numbers depend on besides the options."""
    from optimum_neuron.tools.bench.machine import describe_machine as describe

    return {**describe(), "commit": _commit()}


def _commit() -> str | None:
    """The commit that is measured; "-dirty" where code differs from it."""
    here = Path(__file__).parent
    code = ["optimum_neuron", "benchmark", ":!benchmark/published"]
    try:
        commit = _git(here.parent, "rev-parse", "--short", "HEAD")
        changed = _git(here.parent, "diff", "--name-only", "HEAD", "--", *code)
    except FileNotFoundError:
        return None
    return f"{commit}{'-dirty' * bool(changed)}" if commit else None


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=False)
    return done.stdout.strip()


class OtherProcesses:
    """What other processes take of the CPU from its construction on: all busy time less this process's own."""

    def __init__(self) -> None:
        self._start, self._busy = time.perf_counter(), _busy_seconds()

    def cores(self) -> float | None:
        """Cores kept busy by others, on average; None where the system does not tell."""
        busy = _busy_seconds()
        if self._busy is None or busy is None:
            return None
        return max(0.0, (busy - self._busy) / (time.perf_counter() - self._start))


def _busy_seconds() -> float | None:
    stat = Path("/proc/stat")
    if not stat.is_file():
        return None
    # user nice system idle iowait irq softirq steal: steal is what other machines on this host take
    ticks = [int(word) for word in stat.read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK") - time.process_time()


def warn_if_busy() -> None:
    """Warns where other processes use the CPU now."""
    others = OtherProcesses()
    time.sleep(1)
    cores = others.cores()
    if cores is not None and cores > IDLE_LIMIT:
        warn(
            f"other processes keep {cores:.1f} cores busy; wait for an idle machine, or read the numbers as ratios at best"
        )


def check_vllm() -> None:
    """Raises ImportError where this Python has no vLLM."""
    if importlib.util.find_spec("vllm") is None:
        raise ImportError(
            f"vLLM is not installed for {sys.executable}: run `make bench-vllm`, or this with the python of an environment "
            f"that has vLLM and this package"
        )


def version_of(python: Path, package: str) -> str:
    """The version of a package that an interpreter has.

    Raises:
        FileNotFoundError: there is no such interpreter.
        ImportError: it does not have the package.
    """
    code = f"from importlib.metadata import version; print(version({package!r}))"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ImportError(
            f"{python} has no {package}; `python -m benchmark.http.serve --help` tells how to install it"
        )
    return done.stdout.strip()
