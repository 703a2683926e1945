# SPDX-License-Identifier: Apache-2.0
"""Whether an artifact works on this machine's devices: does everything load there, and compute the right thing?

A check returns what it measured, or raises; a failure is a result with its remedy, and the checks behind it go on.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from threading import Timer
from typing import Any

import numpy as np
import torch

from ...artifact.artifact import Artifact
from ...artifact.find import is_from_hub
from ...checkpoints.digest import file_sha256
from ...config import HLO_TARGETS, NEURON_TARGETS, NeuronConfig
from ...runtime.golden import GOLDEN_NAME, Golden, replay
from ...runtime.profile import Profile
from ...runtime.runner import GraphRunner
from ...runtime.step_tensors import Chunk, DecodeRows
from ...runtime.stopwatch import seconds_of
from ...runtime.traced_runner import open_runner
from ...step.spec import GREEDY, GraphSpec
from ...targets import get_target
from ...targets.neuron.copy_graphs import copy_graphs
from ...targets.neuron.graph_io import COPY_SLOT, KEEP_STATE
from ...targets.neuron.lowering.requirements import check_reading
from ...targets.neuron.sdk.devices import find_devices
from ...targets.neuron.sdk.flags import step_timeout
from ...targets.rank_options import IN_ENVIRONMENT, RankOptions
from ..certify import CERTIFICATE_NAME, NOT_CERTIFIED, is_certified
from .copies import check_slot_copy, check_snapshots
from .prompts import prefill, prompt_of
from .report import CheckError, Report


# Largest difference of a logit to the host's, relative to the largest logit, by type: rounding of a whole model.
TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 2e-2}
MONITOR = "neuron-monitor"
# Seconds that it may take for its first report.
MONITOR_LIMIT_S = 60.0


def check_artifact(
    artifact: Artifact, runs: int, ranks: RankOptions = IN_ENVIRONMENT, profile: Profile | None = None
) -> Report:
    """Runs all checks on an artifact of a Neuron target, or of hlo, on this machine.

    Args:
        runs: timed runs of each graph.
        profile: what is told of all runs, and where a device's runtime writes its own; its context is open.

    Raises:
        ValueError: the artifact is for another target, `runs` is below 1, or an option of ranks is none.
        FileNotFoundError: it has no golden tokens.
        ArtifactError: its golden tokens were changed after the export.
        RuntimeError: this machine lacks what reads graphs in HLO.
    """
    golden = _check_asked(artifact, runs)
    if artifact.target in NEURON_TARGETS:
        step_timeout(ranks.timeout)
        capture = None if profile is None else profile.capture_folder(artifact.target)
        ranks = replace(ranks, capture=capture)
    else:
        ranks.refuse(artifact.target)
    devices = find_devices()
    report = Report(
        {
            "torch": torch.__version__,
            "devices": None if devices is None else asdict(devices),
            "target": artifact.target,
            "config": artifact.config.to_dict(),
            "data": artifact.manifest["target_data"],
        }
    )
    report.run("compiler", lambda: _check_compiler(artifact))
    report.run("certificate", lambda: _check_certificate(artifact), "" if is_certified(artifact) else NOT_CERTIFIED)
    runners: list[GraphRunner] = []
    loaded = report.run("load", lambda: _load(artifact, runners, ranks, profile))
    one_slot = "the artifact has one slot" if artifact.config.batch_size == 1 else ""
    one_block = "the cache is one slot, or one block" if artifact.config.kv_blocks == 1 else ""
    copies = {graph.name for graph in copy_graphs(artifact.config, artifact.model)}
    no_columns = "" if COPY_SLOT in copies else "no graph copies keys and values"
    no_snapshots = "" if KEEP_STATE in copies else "the artifact keeps no snapshots of state"
    for name, check, skipped in (
        ("golden", lambda runner: _check_golden(golden, artifact, runner), ""),
        ("chunks", lambda runner: _check_chunks(artifact, runner), ""),
        ("neighbours", lambda runner: _check_neighbours(artifact, runner), one_slot),
        ("slot copy", lambda runner: check_slot_copy(artifact, runner), one_block or no_columns),
        ("snapshots", lambda runner: check_snapshots(artifact, runner), no_snapshots),
        ("token ids", lambda runner: _check_token_ids(artifact, runner), ""),
        ("latency", lambda runner: _measure_latency(runner, runs), ""),
        ("memory", lambda runner: _measure_memory(), _no_device_memory(artifact.target)),
    ):
        report.run(name, partial(check, *runners), skipped if loaded else "the artifact was not loaded")
    return report


def _check_asked(artifact: Artifact, runs: int) -> Golden:
    """Refuses what cannot be checked; returns what the artifact should answer."""
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
    """Hold the graphs to the digests of those that the export executed; `inspect --verify` executes them again."""
    from ..certify.certify import hlo_files
    from ..certify.document import Certificate

    artifact.verify([CERTIFICATE_NAME])
    certificate = Certificate.read(artifact.path)
    found = {path.stem: file_sha256(path) for path in hlo_files(artifact.path)}
    others = sorted(name for name in found | certificate.graphs if found.get(name) != certificate.graphs.get(name))
    if others:
        raise CheckError(f"{CERTIFICATE_NAME} is of other graphs than {', '.join(others)}")
    return {"layers": f"{certificate.layers} of {certificate.all_layers}", "steps": certificate.steps}


def _load(
    artifact: Artifact, runners: list[GraphRunner], ranks: RankOptions, profile: Profile | None
) -> dict[str, Any]:
    start = time.perf_counter()
    executable = get_target(artifact.target).load(
        artifact, trust_native_code=not is_from_hub(artifact.path), trust_remote_code=False, ranks=ranks
    )
    runners.append(open_runner(artifact, executable, profile=profile))
    loaded = time.perf_counter() - start
    return {"load s": round(loaded, 2), "first runs s": round(seconds_of(runners[0].warm_up), 2)}


def _check_golden(golden: Golden, artifact: Artifact, runner: GraphRunner) -> dict[str, Any]:
    steps = replay(runner, np.asarray(golden.prompt, dtype=np.int32), len(golden.tokens), golden.tokens)
    tolerance, differences, wrong = TOLERANCE[artifact.config.dtype], [0.0], []
    for index, (token, logits) in enumerate(steps):
        candidates, expected = golden.candidates[index], torch.tensor(golden.logits[index])
        scale = float(expected.abs().max())
        if logits is not None:
            differences.append(float((logits[candidates] - expected).abs().max()) / scale)
        rival = candidates.index(token) if token in candidates else None
        near = rival is not None and float(expected[0] - expected[rival]) <= tolerance * scale
        if token != golden.tokens[index] and not near:
            wrong.append(index)
    worst = float(np.max(differences))  # NaN where one of them is
    if wrong or not worst <= tolerance:
        raise CheckError(
            f"tokens {wrong} differ from the recorded ones, logits by {worst:.1e} (tolerance {tolerance:.0e})"
        )
    return {"tokens": len(steps), "largest difference": f"{worst:.1e}"}


def _check_chunks(artifact: Artifact, runner: GraphRunner) -> dict[str, Any]:
    size = runner.config.prefill_chunk_size
    prompt = prompt_of(artifact, min(size + size // 2 + 1, runner.config.sequence_length), seed=1)
    runner.reserve([len(prompt)])
    logits = [prefill(runner, 0, prompt, pieces) for pieces in (size, max(1, size // 2), max(1, size // 3))]
    # The graph follows from a step's length; only where one chunk graph serves all is equality to the bit promised, and
    # not of kernels, which may take a chunk's own tokens apart from those before it.
    same = len(runner.family.kind("chunked_prefill")) == 1 and "attention_cte" not in artifact.config.kernels
    _require_equal(logits, artifact, exact=same)
    return {"boundaries": len(logits), "to the bit": same}


def _check_neighbours(artifact: Artifact, runner: GraphRunner) -> dict[str, Any]:
    size = runner.config.prefill_chunk_size
    prompt = prompt_of(artifact, min(size, runner.config.sequence_length), seed=2)
    lengths = [
        len(prompt),
        *(min(5 + slot, runner.config.sequence_length) for slot in range(1, runner.config.batch_size)),
    ]
    # Blocks may be fewer than all rows take.
    lengths = lengths[: _fitting(lengths, runner.config, runner.config.kv_blocks)]
    rows = []
    for seed in (3, 4):
        runner.reserve(lengths)
        for slot, length in enumerate(lengths[1:], start=1):
            prefill(runner, slot, prompt_of(artifact, length, seed=seed), size)
        rows.append(prefill(runner, 0, prompt, size))
    _require_equal(rows, artifact, exact=True)
    return {"slots": len(lengths)}


def _fitting(lengths: Sequence[int], config: NeuronConfig, most: int) -> int:
    return int(np.searchsorted(np.cumsum([config.blocks_of(length) for length in lengths]), most, side="right"))


def _check_token_ids(artifact: Artifact, runner: GraphRunner) -> dict[str, Any]:
    """Ids beyond the vocabulary are refused before a graph sees them; the first and the last are looked up as others are."""
    size = artifact.model.num_embeddings
    for token in (-1, size):
        runner.reserve([1])
        try:
            runner.prefill([Chunk(0, np.array([token], dtype=np.int32))])
        except ValueError:
            continue
        raise CheckError(f"token id {token} was given to a graph, and the model takes those from 0 to {size - 1}")
    for token in (0, size - 1):
        runner.reserve([1])
        output = runner.prefill([Chunk(0, np.array([token], dtype=np.int32))])
        assert output.chunk_logits is not None
        if not output.chunk_logits.isfinite().all():
            raise CheckError(f"token id {token} makes logits that are not finite")
        chosen = -1 if output.chunk_tokens is None else int(output.chunk_tokens[0])
        if output.chunk_tokens is not None and not 0 <= chosen < artifact.model.vocab_size:
            raise CheckError(f"after token id {token} it chose {chosen}, of {artifact.model.vocab_size} tokens")
    return {"embeddings": size, "refused": 2}


def _require_equal(logits: list[torch.Tensor], artifact: Artifact, *, exact: bool) -> None:
    worst = float(torch.stack([row - logits[0] for row in logits]).abs().max())  # NaN where one is
    scale = float(logits[0].abs().max())
    if not worst <= (0.0 if exact else TOLERANCE[artifact.config.dtype] * scale):
        raise CheckError(f"logits differ by {worst:.1e}, the largest one is {scale:.1e}")


def _measure_latency(runner: GraphRunner, runs: int) -> dict[str, Any]:
    """Milliseconds per step of every graph, at the end of its context, with all rows at work that the graph holds so."""
    medians = {}
    for graph in runner.family:
        lengths = _full_lengths(graph, runner.config)
        chunks, decode = _full_step(graph, lengths)
        times = []
        for _ in range(runs):
            runner.reserve([graph.context_length] * len(lengths))
            runner.lengths[: len(lengths)] = lengths
            times.append(1000 * seconds_of(partial(runner.step, chunks, decode, graph)))
        medians[f"{graph.name} ms"] = round(statistics.median(times), 3)
    runner.reset_all()  # what the runs wrote is of no use
    return medians


def _full_lengths(graph: GraphSpec, config: NeuronConfig) -> list[int]:
    """Tokens of each slot before a step that ends at the graph's context: chunk rows have the first slots, the others decode."""
    chunk_rows = graph.ctx_batch_size if graph.has_chunk else 0
    rows = graph.batch_size if graph.has_decode else chunk_rows
    lengths = [graph.context_length - (graph.chunk_size if slot < chunk_rows else 1) for slot in range(rows)]
    return lengths[: _fitting([graph.context_length] * rows, config, graph.blocks_in_place or config.kv_blocks)]


def _full_step(graph: GraphSpec, lengths: Sequence[int]) -> tuple[list[Chunk], DecodeRows | None]:
    chunk_rows = min(graph.ctx_batch_size if graph.has_chunk else 0, len(lengths))
    chunks = [Chunk(slot, np.zeros(graph.chunk_size, dtype=np.int32)) for slot in range(chunk_rows)]
    if not graph.has_decode:
        return chunks, None
    slots = np.arange(graph.batch_size)
    active = (slots >= chunk_rows) & (slots < len(lengths))
    sampling = np.tile(np.asarray(GREEDY, dtype=np.float32), (len(slots), 1))
    return chunks, DecodeRows(np.zeros_like(slots, dtype=np.int32), active, sampling, np.zeros(len(slots), np.float32))


def _no_device_memory(target: str) -> str:
    if target not in NEURON_TARGETS:
        return f"target {target} has no device"
    if shutil.which(MONITOR) is None:
        return f"there is no {MONITOR} on PATH; it is part of aws-neuronx-tools"
    return ""


def _measure_memory() -> dict[str, Any]:
    """What all processes have in use on the devices, from the tool's first report."""
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
