# SPDX-License-Identifier: Apache-2.0
"""The checks of neuron_smoke.py. Each returns what it measured, or raises; a failure is a result, with its remedy."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from optimum_neuron.artifact import Artifact
from optimum_neuron.config import NEURON_TARGETS, NeuronConfig
from optimum_neuron.export import export_model
from optimum_neuron.golden import Golden, replay
from optimum_neuron.graphs.spec import GREEDY, GraphSpec
from optimum_neuron.graphs.step import example_inputs
from optimum_neuron.runtime.runner import Chunk, GraphRunner
from optimum_neuron.targets import get_target
from optimum_neuron.targets.neuron.lint.lint import installed_operators, lint_artifact


# Largest difference of a logit to the host's, relative to the largest logit, by type: rounding of a whole model.
TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 2e-2}
REMEDIES = {
    "compiler": "install neuronx-cc from AWS's Neuron repository, or report the operators that it does not list",
    "export": "read the code in the message; a smaller batch, chunk or context makes a smaller graph",
    "load": "check neuron-ls, NEURON_RT_VISIBLE_CORES and that the SDK is the one that compiled the artifact",
    "golden": "run with --dtype float32 to tell rounding from a fault, then with one layer fewer per run to find it",
    "chunks": "a graph is not deterministic or its scatter is wrong: report it with this JSON",
    "neighbours": "a row reads another row's cache: report it with this JSON",
    "slot copy": "the copy_slot graph is wrong: turn off prefix reuse and report it with this JSON",
    "latency": "compare with `optimum-cli neuron estimate`; a graph far above it wants other compiler flags",
    "memory": "compare with `optimum-cli neuron estimate`; install aws-neuronx-tools for neuron-monitor",
}


class CheckError(Exception):
    """A check ran, and found a wrong result."""


@dataclass
class Result:
    name: str
    status: str  # passed, failed or skipped
    seconds: float
    values: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    remedy: str = ""


@dataclass
class Report:
    """All results; printed as a table and as JSON."""

    facts: dict[str, Any]
    results: list[Result] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return all(result.status != "failed" for result in self.results)

    def run(self, name: str, check: Callable[[], dict[str, Any]]) -> bool:
        """Runs a check; whether it passed."""
        start = time.perf_counter()
        try:
            values, status, problem = check(), "passed", ""
        except Exception as error:  # whatever a device or a driver raises is a finding of this report
            values, status, problem = {}, "failed", f"{type(error).__name__}: {error}"
        remedy = REMEDIES[name] if status == "failed" else ""
        self.results.append(Result(name, status, time.perf_counter() - start, values, problem, remedy))
        return status == "passed"

    def skip(self, names: tuple[str, ...], why: str) -> None:
        self.results += [Result(name, "skipped", 0.0, problem=why) for name in names]

    def to_json(self) -> str:
        results = [asdict(result) for result in self.results]
        return json.dumps({"passed": self.passed, "facts": self.facts, "results": results})

    def print(self, file: TextIO) -> None:
        table = Table("check", "result", "s", "what was seen", title="neuron smoke test", title_justify="left")
        for result in self.results:
            seen = result.problem or ", ".join(f"{name} {value}" for name, value in result.values.items())
            table.add_row(result.name, result.status, f"{result.seconds:.1f}", seen)
        console = Console(file=file)
        console.print(table)
        for result in self.results:
            if result.status == "failed":
                console.print(f"{result.name}: {result.remedy}", highlight=False)


def run_checks(folder: Path, model: str | None, config: NeuronConfig | None, runs: int) -> Report:
    """Runs all checks on an artifact, exported first where `config` is given."""
    report = Report({"torch": torch.__version__, "neuron-ls": _devices()})
    later = ("load", "golden", "chunks", "neighbours", "slot copy", "latency", "memory")
    if config is not None:
        assert model is not None
        if not report.run("export", lambda: {"folder": str(export_model(model, folder, config=config))}):
            report.skip(("compiler", *later), "there is no artifact")
            return report
    artifact = Artifact.open(folder)
    report.facts |= {
        "target": artifact.target,
        "config": artifact.config.to_dict(),
        "data": artifact.manifest["target_data"],
    }
    report.run("compiler", lambda: _check_compiler(artifact))
    runners: list[GraphRunner] = []
    if not report.run("load", lambda: _load(artifact, runners)):
        report.skip(later[1:], "the artifact was not loaded")
        return report
    runner = runners[0]
    report.run("golden", lambda: _check_golden(artifact, runner))
    report.run("chunks", lambda: _check_chunks(artifact, runner))
    report.run("neighbours", lambda: _check_neighbours(artifact, runner))
    report.run("slot copy", lambda: _check_slot_copy(artifact, runner))
    report.run("latency", lambda: _measure_latency(runner, runs))
    if artifact.target in NEURON_TARGETS:
        monitor = shutil.which("neuron-monitor")
        if monitor is None:
            report.skip(("memory",), "there is no neuron-monitor on PATH; it is part of aws-neuronx-tools")
        else:
            report.run("memory", lambda: _measure_memory(monitor))
    return report


def _check_compiler(artifact: Artifact) -> dict[str, Any]:
    operators = installed_operators() if artifact.target in NEURON_TARGETS else None
    findings = lint_artifact(artifact, operators=operators)
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        raise CheckError("; ".join(str(finding) for finding in errors[:3]))
    return {"graphs": len(artifact.graphs), "warnings": len(findings), "operators listed": len(operators or ())}


def _load(artifact: Artifact, runners: list[GraphRunner]) -> dict[str, Any]:
    start = time.perf_counter()
    executable = get_target(artifact.target).load(artifact, trust_native_code=True, trust_remote_code=False)
    runners.append(
        GraphRunner(executable, artifact.config, artifact.graphs, reuses_prefixes=artifact.model.reuses_prefixes)
    )
    loaded = time.perf_counter()
    runners[0].warm_up()
    return {"load s": round(loaded - start, 2), "first runs s": round(time.perf_counter() - loaded, 2)}


def _check_golden(artifact: Artifact, runner: GraphRunner) -> dict[str, Any]:
    golden = Golden.read(artifact.path)
    steps = replay(runner, np.asarray(golden.prompt, dtype=np.int32), len(golden.tokens), golden.tokens)
    tolerance, worst, wrong = TOLERANCE[artifact.config.dtype], 0.0, []
    for index, (token, logits) in enumerate(steps):
        scale = max(abs(value) for value in golden.logits[index])
        if logits is not None:
            found = logits[golden.candidates[index]]
            worst = max(worst, float((found - torch.tensor(golden.logits[index])).abs().max()) / scale)
        rival = golden.candidates[index].index(token) if token in golden.candidates[index] else None
        near = rival is not None and golden.logits[index][0] - golden.logits[index][rival] <= tolerance * scale
        if token != golden.tokens[index] and not near:
            wrong.append(index)
    if wrong or worst > tolerance:
        raise CheckError(
            f"tokens {wrong} differ from the recorded ones, logits by {worst:.1e} (tolerance {tolerance:.0e})"
        )
    return {"tokens": len(steps), "largest difference": f"{worst:.1e}"}


def _check_chunks(artifact: Artifact, runner: GraphRunner) -> dict[str, Any]:
    size = runner.config.prefill_chunk_size
    prompt = _prompt(artifact, min(size + size // 2 + 1, runner.config.sequence_length), seed=1)
    logits = [_prefill(runner, 0, prompt, pieces) for pieces in (size, max(1, size // 2), max(1, size // 3))]
    # The graph follows from a step's length; only where one chunk graph serves all is equality to the bit promised.
    same = len(runner.family.kind("chunked_prefill")) == 1
    _require_equal(logits, artifact, exact=same)
    return {"boundaries": len(logits), "to the bit": same}


def _check_neighbours(artifact: Artifact, runner: GraphRunner) -> dict[str, Any]:
    if runner.config.batch_size == 1:
        return {"slots": 1}
    size = runner.config.prefill_chunk_size
    prompt = _prompt(artifact, min(size, runner.config.sequence_length), seed=2)
    rows = []
    for seed in (3, 4):
        runner.reset_all()
        for slot in range(1, runner.config.batch_size):
            _prefill(runner, slot, _prompt(artifact, 5 + slot, seed=seed), size)
        rows.append(_prefill(runner, 0, prompt, size))
    _require_equal(rows, artifact, exact=True)
    return {"slots": runner.config.batch_size}


def _check_slot_copy(artifact: Artifact, runner: GraphRunner) -> dict[str, Any]:
    if runner.config.batch_size == 1 or not artifact.model.reuses_prefixes:
        return {"slots": runner.config.batch_size}
    length = min(17, runner.config.sequence_length)
    _prefill(runner, 0, _prompt(artifact, length, seed=5), runner.config.prefill_chunk_size)
    runner.executable.copy_slot(0, 1, length)
    for state in artifact.states():
        tensor = runner.executable.read_state(state.name)
        if not torch.equal(tensor[1, :, :length], tensor[0, :, :length]) or not tensor[0, :, :length].any():
            raise CheckError(f"{state.name} of slot 1 is not that of slot 0")
    return {"states": len(artifact.states())}


def _require_equal(logits: list[torch.Tensor], artifact: Artifact, *, exact: bool) -> None:
    worst = max(float((row - logits[0]).abs().max()) for row in logits)
    scale = float(logits[0].abs().max())
    if worst > (0.0 if exact else TOLERANCE[artifact.config.dtype] * scale):
        raise CheckError(f"logits differ by {worst:.1e}, the largest one is {scale:.1e}")


def _prefill(runner: GraphRunner, slot: int, prompt: np.ndarray, pieces: int) -> torch.Tensor:
    runner.reset(slot)
    for start in range(0, len(prompt), pieces):
        output = runner.prefill([Chunk(slot, prompt[start : start + pieces])])
    assert output.chunk_logits is not None
    return output.chunk_logits[0].clone()


def _prompt(artifact: Artifact, length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, artifact.model.vocab_size, length).astype(np.int32)


def _measure_latency(runner: GraphRunner, runs: int) -> dict[str, Any]:
    """Milliseconds per run of every graph, all rows at work and at the end of its context."""
    medians = {}
    for graph in runner.family:
        inputs, times = _full_step(graph), []
        for _ in range(runs):
            start = time.perf_counter()
            runner.executable.run(graph.name, inputs)
            times.append((time.perf_counter() - start) * 1000)
        medians[f"{graph.name} ms"] = round(statistics.median(times), 3)
    runner.reset_all()  # what the runs wrote is of no use
    return medians


def _full_step(graph: GraphSpec) -> list[torch.Tensor]:
    """Inputs of a step at the end of the context: chunk rows fill the first slots, the others decode."""
    inputs = dict(zip((spec.name for spec in graph.inputs()), example_inputs(graph.inputs()), strict=True))
    chunk_rows = graph.ctx_batch_size if graph.has_chunk else 0
    if graph.has_decode:
        inputs["decode.position_ids"][:chunk_rows] = -1
        inputs["decode.position_ids"][chunk_rows:] = graph.context_length - 1
    if graph.has_chunk:
        inputs["chunk.position_ids"][:] = torch.arange(graph.context_length - graph.chunk_size, graph.context_length)
        inputs["chunk.seq_ids"][:] = torch.arange(chunk_rows)
    for name, tensor in inputs.items():
        if name.endswith("sampling_params"):
            tensor[:] = torch.tensor(GREEDY)
    return list(inputs.values())


def _measure_memory(tool: str) -> dict[str, Any]:
    with subprocess.Popen([tool], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.kill()
    used = [
        entry["report"]["memory_used"]["neuron_runtime_used_bytes"]["neuron_device"]
        for entry in json.loads(line)["neuron_runtime_data"]
    ]
    return {"device GB": round(sum(used) / 1e9, 2)}


def _devices() -> str:
    tool = shutil.which("neuron-ls")
    if tool is None:
        return "not installed"
    return subprocess.run([tool], capture_output=True, text=True, check=False, timeout=60).stdout
