# SPDX-License-Identifier: Apache-2.0
"""An export in a process of its own, which the kernel gives no more memory than a limit."""

from __future__ import annotations

import logging
import multiprocessing
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


_SECONDS_BETWEEN = 0.02
_COUNTED = ("VmData", "RssAnon", "RssShmem", "VmHWM")


@dataclass(frozen=True)
class Measured:
    """One export.

    Attributes:
        exit_code: 0 where it ended well.
        peaks: bytes by the name that /proc/PID/status has for them: VmData is what RLIMIT_DATA limits.
    """

    exit_code: int
    seconds: float
    peaks: dict[str, int]


def measure(checkpoint: Path, output: Path, options: dict[str, Any], limit: int) -> Measured:
    """Exports in a new process and looks at its memory meanwhile.

    Args:
        options: of `NeuronConfig`.
        limit: bytes of private memory that can be written to (RLIMIT_DATA): what the process has taken, whether touched or not. Files
            that it maps to read, or shares with others, do not count: of these the system takes pages back when it wants to.
    """
    process = multiprocessing.get_context("spawn").Process(target=_export, args=(checkpoint, output, options, limit))
    start = time.perf_counter()
    process.start()
    peaks = dict.fromkeys(_COUNTED, 0)
    while process.is_alive():
        for name, value in _status(process.pid).items():
            peaks[name] = max(peaks[name], value)
        time.sleep(_SECONDS_BETWEEN)
    process.join()
    return Measured(process.exitcode or 0, time.perf_counter() - start, peaks)


def _status(pid: int | None) -> dict[str, int]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    fields = dict(line.split(":", 1) for line in lines)
    return {name: int(fields[name].split()[0]) * 1024 for name in _COUNTED if name in fields}


def _export(checkpoint: Path, output: Path, options: dict[str, Any], limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    from optimum_neuron import NeuronConfig, export_model

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    export_model(checkpoint, output, config=NeuronConfig(**options))
