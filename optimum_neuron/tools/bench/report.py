# SPDX-License-Identifier: Apache-2.0
"""From an artifact to its measured speeds, as JSON and as tables."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from ... import progress
from ...artifact.artifact import Artifact, is_weight_file
from ...cli import make_table
from ...generate.model import NeuronModelForCausalLM
from ...hub.collect import speed_digest
from ...step.state_specs import byte_count, kept_states
from .machine import describe_machine, peak_bytes
from .measure import Bench, BenchPlan, Decode, Prefill, Spread


_MEMORY = {
    "weights_bytes": "weights", "state_bytes": "cache and state", "host_peak_bytes": "the host at the peak",
}  # fmt: skip


@dataclass(frozen=True)
class BenchReport:
    """Speeds of an artifact on a machine."""

    artifact: str  # its folder
    digest: str  # its `speed_digest`
    config: dict[str, Any]
    machine: dict[str, Any]
    new_tokens: int
    repeat: int
    load_seconds: float  # from the folder to graphs that can run, without the imports of libraries
    warm_up_seconds: float  # the first run of each graph
    memory: dict[str, int | None]  # bytes of weights, of cache and states, and of this process at its peak
    prefill: tuple[Prefill, ...]
    decode: tuple[Decode, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON: these fields, those of `measure.py`, and the format's number."""
        # Another number where a reader of the one before would misread it.
        return {"format": 1, **dataclasses.asdict(self)}


def run_bench(artifact: Artifact, plan: BenchPlan, **options: Any) -> BenchReport:
    """Load an artifact with options of `from_pretrained`, and measure it; raise ValueError or RuntimeError where it cannot be."""
    start = time.perf_counter()
    model = NeuronModelForCausalLM.from_pretrained(artifact.path, export=False, **options)
    loaded = time.perf_counter()
    model.runner.warm_up()
    warm = time.perf_counter()
    runs = (len(plan.prompt_lengths) + len(plan.rows)) * (plan.repeat + 1)
    with progress.stage("Measuring", runs) as advance:
        bench = Bench(model.runner, artifact.model, advance)
        prefill = tuple(bench.measure_prefill(length, plan.repeat) for length in plan.prompt_lengths)
        decode = tuple(
            bench.measure_decode(rows, plan.context_length, plan.new_tokens, plan.repeat) for rows in plan.rows
        )
    weights = sum(entry["size"] for name, entry in artifact.manifest["files"].items() if is_weight_file(name))
    state = byte_count(kept_states(artifact.config, artifact.model))
    return BenchReport(
        artifact=str(artifact.path),
        digest=speed_digest(artifact),
        config=artifact.config.to_dict(),
        machine=describe_machine(),
        new_tokens=plan.new_tokens,
        repeat=plan.repeat,
        load_seconds=loaded - start,
        warm_up_seconds=warm - loaded,
        memory={"weights_bytes": weights, "state_bytes": state, "host_peak_bytes": peak_bytes()},
        prefill=prefill,
        decode=decode,
    )


def print_report(report: BenchReport, terminal: Console) -> None:
    machine, config, memory = report.machine, report.config, report.memory
    terminal.print(
        f"{report.artifact}: {config['target']}, {config['dtype']}, {config['batch_size']} rows of {config['sequence_length']:,} tokens, "
        f"chunks of {config['prefill_chunk_size']}\n"
        f"{machine['cpu']}, kernels for {machine['kernels']}, {machine['threads']} threads on {machine['cores']} cores; torch "
        f"{machine['torch']}, transformers {machine['transformers']}, optimum-neuron-runtime {machine['optimum_neuron']}",
        soft_wrap=True,
    )
    prompts = make_table("Prefill, a prompt alone", (), ("prompt tokens", "tok/s", "TTFT, ms", "padding"))
    for row in report.prefill:
        speed, ttft = _spread_text(row.tokens_per_second), _spread_text(row.ttft_ms)
        prompts.add_row(f"{row.prompt_tokens:,}", speed, ttft, f"{row.padding_share:.0%}")
    title = f"Decode, after {report.decode[0].context_tokens:,} tokens a row"
    rows = make_table(title, (), ("rows", "tok/s", "step, ms", "ITL p50, ms", "ITL p99, ms", "idle rows"))
    for each in report.decode:
        numbers = (f"{each.tokens_per_second:,.1f}", _spread_text(each.step_ms))
        latencies = (f"{each.itl_p50_ms:,.2f}", f"{each.itl_p99_ms:,.2f}")
        rows.add_row(str(each.rows), *numbers, *latencies, f"{each.idle_share:.0%}")
    terminal.print(prompts, rows, sep="\n")
    sizes = [f"{size / 1e6:,.0f} MB of {_MEMORY[name]}" for name, size in memory.items() if size is not None]
    terminal.print(
        f"loaded in {report.load_seconds:.2f} s, warm in {report.warm_up_seconds:.2f} s; {', '.join(sizes)}\n"
        f"medians of {report.repeat} (least to most), after one that is not counted",
        soft_wrap=True,
    )


def _spread_text(spread: Spread) -> str:
    digits = 0 if spread.median >= 1000 else 1 if spread.median >= 100 else 2
    return f"{spread.median:,.{digits}f} ({spread.min:,.{digits}f} to {spread.max:,.{digits}f})"
