# SPDX-License-Identifier: Apache-2.0
"""The machine that is measured on: what it is and can do at most, and whether others use it meanwhile. Imports torch late."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .output import warn


if TYPE_CHECKING:
    import torch

# Cores that other processes may keep busy before a number is worth a warning.
IDLE_LIMIT = 0.1
READ_BYTES = 1 << 30
PRODUCT_SIZE = 2048
REPEATS = 7
# Seconds after which nothing is tried again: without products of bfloat16 in hardware, torch would take minutes for all of them.
LONG_ENOUGH = 5.0


def describe_machine() -> dict[str, Any]:
    """What the numbers depend on besides the options."""
    from optimum_neuron.tools.bench.machine import describe_machine as describe

    return {**describe(), "commit": _commit()}


def _commit() -> str | None:
    """Return the commit that is measured; "-dirty" where code differs from it."""
    try:
        commit = _git("rev-parse", "--short", "HEAD")
        changed = _git("diff", "--name-only", "HEAD", "--", "optimum_neuron", "benchmark", ":!benchmark/published")
    except FileNotFoundError:
        return None
    return f"{commit}{'-dirty' * bool(changed)}" if commit else None


def _git(*words: str) -> str:
    command = ["git", "-C", str(Path(__file__).parents[1]), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


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


def proc_bytes(file: str, key: str) -> int:
    """Return a size that a file of /proc has, as /proc/meminfo has MemAvailable; raise OSError where there is none."""
    for line in Path(file).read_text(encoding="ascii").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{file} has no {key}")


def last_error(log: Path) -> str:
    """Return the last line of a log that names an error, or its last line."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    named = [line for line in lines if "error:" in line or "Error:" in line]
    return (named or lines or ["it said nothing"])[-1]


def openmp_of(python: Path) -> dict[str, str]:
    """Return the variable that preloads Intel's OpenMP where an environment has it: vLLM's wheel brings it, and is twice as fast with it."""
    library = python.parent.parent / "lib" / "libiomp5.so"
    return {"LD_PRELOAD": str(library)} if library.is_file() else {}


@dataclass(frozen=True)
class Limits:
    """Best of several tries, with as many threads as torch has.

    Attributes:
        read: bytes per second out of memory, of a tensor that no cache holds.
        products: operations per second of a product of square matrices, two for each multiplication, by type; bfloat16's
            is float32's where that is higher, as weights can be converted.
    """

    read: float
    products: dict[str, float]

    def best(self, other: Limits) -> Limits:
        """The higher of each: another process can only have lowered them."""
        products = {name: max(rate, other.products[name]) for name, rate in self.products.items()}
        return Limits(max(self.read, other.read), products)


def measure_limits() -> Limits:
    """Measure them in some seconds and 1 GiB of memory."""
    import torch

    products = {name: _products(getattr(torch, name)) for name in ("float32", "bfloat16")}
    products["bfloat16"] = max(products.values())
    return Limits(measure_read(), products)


def measure_read() -> float:
    """Measure what Limits has as `read`, in a second and 1 GiB of memory in huge pages, as a loaded artifact's weights have them."""
    import torch

    from optimum_neuron.artifact.pages import zeroed

    memory = zeroed(READ_BYTES)
    numbers = torch.frombuffer(memory, dtype=torch.float32).fill_(1)
    return READ_BYTES / _fastest(numbers.sum)


def _products(dtype: torch.dtype) -> float:
    import torch

    left, right = (torch.randn(PRODUCT_SIZE, PRODUCT_SIZE).to(dtype) for _ in range(2))
    return 2 * PRODUCT_SIZE**3 / _fastest(lambda: left @ right)


def _fastest(call: Callable[[], object]) -> float:
    times: list[float] = []
    while len(times) < REPEATS and sum(times) < LONG_ENOUGH:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
