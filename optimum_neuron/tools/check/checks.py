# SPDX-License-Identifier: Apache-2.0
"""All checks of an artifact on this machine's devices. A failed one is a result with its remedy, and those after it still run."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from threading import Timer
from typing import Any, Literal

import torch

from ...artifact.artifact import Artifact
from ...artifact.filesystem import file_sha256
from ...artifact.find import is_from_hub
from ...config import HLO_TARGETS, NEURON_TARGETS
from ...hub.collect import read_certificate
from ...runtime.golden import GOLDEN_NAME, Golden
from ...runtime.profile import Profile
from ...runtime.runner import GraphRunner
from ...runtime.timing import load_runner, measure_seconds
from ...targets import IN_ENVIRONMENT, RankOptions
from ...targets.neuron.graphs.io import COPY_SLOT, KEEP_STATE
from ...targets.neuron.graphs.state_graphs import copy_graphs
from ...targets.neuron.sdk.devices import find_devices
from ...targets.neuron.sdk.flags import step_timeout
from ...targets.neuron.sdk.stacks import check_reading
from ..certify import CERTIFICATE_NAME, NOT_CERTIFIED, is_certified
from . import step_checks
from .step_checks import CheckError


MONITOR = "neuron-monitor"
# Seconds that it may take for its first report.
MONITOR_LIMIT_S = 60.0
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


@dataclass(frozen=True)
class CheckResult:
    """The result of one check: its measured values, or the fault and its remedy, or the reason to skip it."""

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
        return {"passed": self.passed, **asdict(self)}


def check_artifact(
    artifact: Artifact, runs: int, ranks: RankOptions = IN_ENVIRONMENT, profile: Profile | None = None
) -> CheckReport:
    """Run all checks on an artifact of a Neuron target, or of hlo, on this machine, with so many timed runs of each graph.

    An open profile takes all runs, and gives a device's runtime its folder.

    Raises:
        ValueError: the artifact is for another target, `runs` is below 1, or an option of ranks is wrong.
        FileNotFoundError, ArtifactError: it has no golden tokens, or others than the export wrote.
        RuntimeError: this machine lacks the libraries that read HLO.
    """
    golden = _read_golden(artifact, runs)
    if artifact.target in NEURON_TARGETS:
        step_timeout(ranks.timeout)
    else:
        ranks.refuse(artifact.target)
    devices = find_devices()
    report = CheckReport(
        {
            "torch": torch.__version__,
            "devices": None if devices is None else asdict(devices),
            "target": artifact.target,
            "config": artifact.config.to_dict(),
            "data": artifact.manifest["target_data"],
        }
    )
    certified = "" if is_certified(artifact) else NOT_CERTIFIED
    report.run_check("compiler", lambda: _check_compiler(artifact))
    report.run_check("certificate", lambda: _check_certificate(artifact), certified)
    runners: list[GraphRunner] = []
    loaded = report.run_check("load", lambda: _load_graphs(artifact, runners, ranks, profile))
    one_slot = "the artifact has one slot" if artifact.config.batch_size == 1 else ""
    one_block = "the cache is one slot, or one block" if artifact.config.kv_blocks == 1 else ""
    copies = {graph.name for graph in copy_graphs(artifact.config, artifact.model)}
    no_columns = "" if COPY_SLOT in copies else "no graph copies keys and values"
    no_states = "" if KEEP_STATE in copies else "no graph copies states"
    no_device = "" if artifact.target in NEURON_TARGETS else f"target {artifact.target} has no device"
    no_monitor = "" if shutil.which(MONITOR) else f"there is no {MONITOR} on PATH; it is part of aws-neuronx-tools"
    for name, check, skipped in (
        ("golden", lambda runner: step_checks.check_golden(golden, artifact, runner), ""),
        ("chunks", lambda runner: step_checks.check_chunks(artifact, runner), ""),
        ("neighbours", lambda runner: step_checks.check_neighbours(artifact, runner), one_slot),
        ("slot copy", lambda runner: step_checks.check_slot_copy(artifact, runner), one_block or no_columns),
        ("snapshots", lambda runner: step_checks.check_kept_state(artifact, runner), no_states),
        ("token ids", lambda runner: step_checks.check_token_ids(artifact, runner), ""),
        ("latency", lambda runner: step_checks.measure_latency(runner, runs), ""),
        ("memory", lambda runner: _measure_memory(), no_device or no_monitor),
    ):
        report.run_check(name, partial(check, *runners), skipped if loaded else "the artifact was not loaded")
    return report


def _read_golden(artifact: Artifact, runs: int) -> Golden:
    """Refuse an artifact that cannot be checked; return its golden tokens."""
    if runs < 1:
        raise ValueError(f"runs={runs} leaves nothing to take a time of; give at least 1")
    if artifact.target not in HLO_TARGETS:
        raise ValueError(
            f"{artifact.path} was exported for {artifact.target}, and only what runs on Neuron devices is checked; export "
            f"the model for one of {', '.join(HLO_TARGETS)}"
        )
    if GOLDEN_NAME not in artifact.manifest["files"]:
        raise FileNotFoundError(
            f"{artifact.path} has no {GOLDEN_NAME}, which holds what the exporting host answered; export the model again"
        )
    artifact.verify([GOLDEN_NAME])
    check_reading()
    return Golden.read(artifact.path)


def _check_compiler(artifact: Artifact) -> dict[str, Any]:
    from ...targets.neuron.lint.lint import installed_operators, lint_artifact

    operators = installed_operators() if artifact.target in NEURON_TARGETS else None
    findings = lint_artifact(artifact, operators=operators)
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        raise CheckError("; ".join(str(finding) for finding in errors[:3]))
    return {"graphs": len(artifact.graphs), "warnings": len(findings), "operators listed": len(operators or ())}


def _check_certificate(artifact: Artifact) -> dict[str, Any]:
    """Compare the graphs' digests with those that the export executed."""
    from ..certify.certify import hlo_files

    artifact.verify([CERTIFICATE_NAME])
    certificate = read_certificate(artifact)
    assert certificate is not None
    found = {path.stem: file_sha256(path) for path in hlo_files(artifact.path)}
    others = sorted(name for name in found | certificate.graphs if found.get(name) != certificate.graphs.get(name))
    if others:
        raise CheckError(f"{CERTIFICATE_NAME} certifies other graphs than {', '.join(others)}")
    return {"layers": f"{certificate.layers} of {certificate.all_layers}", "steps": certificate.steps}


def _load_graphs(
    artifact: Artifact, runners: list[GraphRunner], ranks: RankOptions, profile: Profile | None
) -> dict[str, Any]:
    start = time.perf_counter()
    runner = load_runner(artifact, trust_native_code=not is_from_hub(artifact.path), ranks=ranks, profile=profile)
    runners.append(runner)
    loaded = time.perf_counter() - start
    return {"load s": round(loaded, 2), "first runs s": round(measure_seconds(runners[0].warm_up), 2)}


def _measure_memory() -> dict[str, Any]:
    """Return the device memory of all processes, from the tool's first report."""
    with subprocess.Popen([MONITOR], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        timer = Timer(MONITOR_LIMIT_S, process.kill)
        timer.start()
        try:
            line = process.stdout.readline()
        finally:
            timer.cancel()
            process.kill()
    if not line:
        raise CheckError(f"{MONITOR} reported nothing within {MONITOR_LIMIT_S:.0f} s")
    used = [
        entry["report"]["memory_used"]["neuron_runtime_used_bytes"]["neuron_device"]
        for entry in json.loads(line)["neuron_runtime_data"]
    ]
    return {"device GB": round(sum(used) / 1e9, 2)}
