# SPDX-License-Identifier: Apache-2.0
"""Results of acceptance checks in their order, each failure with its remedy."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal


# The remedy of each check, in the order in which they run.
REMEDIES = {
    "compiler": "install neuronx-cc from AWS's Neuron repository, or report the operators that it does not list",
    "certificate": "the graphs are not those that the export executed: export the model again with --certify",
    "load": "check neuron-ls, NEURON_RT_VISIBLE_CORES and that the SDK is the one that compiled the artifact",
    "golden": "export with --dtype float32 to separate rounding from a fault, then with one layer fewer each time to find it",
    "chunks": "a graph is not deterministic or its scatter is wrong: report it with the JSON of this check",
    "neighbours": "a row reads another row's cache: report it with the JSON of this check",
    "slot copy": "the copy_slot graph is wrong: turn off prefix reuse and report it with the JSON of this check",
    "snapshots": "the graphs keep_state and restore_state are wrong: turn off prefix reuse and report it with the JSON of this check",
    "token ids": "the embedding or the choice of a token is wrong at the vocabulary's edge: report it with the JSON of this check",
    "latency": "compare with optimum-cli neuron estimate; a graph far above it wants other compiler flags",
    "memory": "compare with optimum-cli neuron estimate; install aws-neuronx-tools for neuron-monitor",
}


class CheckError(Exception):
    """A wrong result that a check found."""


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    Attributes:
        values: measured values by name.
        problem: the fault, or the reason to skip the check.
        remedy: the way to correct a failure.
    """

    name: str
    status: Literal["passed", "failed", "skipped"]
    seconds: float = 0.0
    values: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    remedy: str = ""


@dataclass
class CheckReport:
    """All results, and the facts that they depend on."""

    facts: dict[str, Any]
    results: list[CheckResult] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return all(result.status != "failed" for result in self.results)

    def run_check(self, name: str, check: Callable[[], dict[str, Any]], skipped: str = "") -> bool:
        """Run a check, unless there is a reason to skip it; return whether it passed."""
        if skipped:
            self.results.append(CheckResult(name, "skipped", problem=skipped))
            return False
        start = time.perf_counter()
        try:
            result = CheckResult(name, "passed", values=check())
        except Exception as error:  # whatever a device or a driver raises is a finding of this report
            result = CheckResult(name, "failed", problem=f"{type(error).__name__}: {error}", remedy=REMEDIES[name])
        self.results.append(replace(result, seconds=time.perf_counter() - start))
        return result.status == "passed"

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON."""
        return {"passed": self.passed, **asdict(self)}
