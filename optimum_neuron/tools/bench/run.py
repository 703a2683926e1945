# SPDX-License-Identifier: Apache-2.0
"""From an artifact to its report."""

from __future__ import annotations

import time
from pathlib import Path

from ... import progress
from ...artifact.artifact import Artifact, is_weight_file
from ...generate import NeuronModelForCausalLM
from ...step.state_sizes import byte_count
from .machine import describe_machine, peak_bytes
from .measure import Bench, Plan
from .report import Memory, Report


def run_bench(
    artifact: Artifact,
    plan: Plan,
    *,
    trust_remote_code: bool,
    rank_python: Path | str | None,
    rank_timeout: float | None,
) -> Report:
    """Load an artifact and measure it; raise ValueError or RuntimeError where it cannot be loaded or run here."""
    start = time.perf_counter()
    model = NeuronModelForCausalLM.from_pretrained(
        artifact.path,
        export=False,
        trust_remote_code=trust_remote_code,
        rank_python=rank_python,
        rank_timeout=rank_timeout,
    )
    loaded = time.perf_counter()
    model.runner.warm_up()
    warm = time.perf_counter()
    runs = (len(plan.prompt_lengths) + len(plan.rows)) * (plan.repeat + 1)
    with progress.stage("Measuring", runs) as advance:
        bench = Bench(model.runner, artifact.model, advance)
        prefill = tuple(bench.prefill(length, plan.repeat) for length in plan.prompt_lengths)
        decode = tuple(bench.decode(rows, plan.context_length, plan.new_tokens, plan.repeat) for rows in plan.rows)
    files = artifact.manifest["files"].items()
    memory = Memory(
        sum(entry["size"] for name, entry in files if is_weight_file(name)),
        byte_count(artifact.states()) + byte_count(artifact.snapshots()),
        peak_bytes(),
    )
    return Report(
        artifact=str(artifact.path),
        config=artifact.config.to_dict(),
        machine=describe_machine(),
        new_tokens=plan.new_tokens,
        repeat=plan.repeat,
        load_seconds=loaded - start,
        warm_up_seconds=warm - loaded,
        memory=memory,
        prefill=prefill,
        decode=decode,
    )
