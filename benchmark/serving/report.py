# SPDX-License-Identifier: Apache-2.0
"""Collects and shows what serving measured: tables, ratios, a plot of the steps, and JSON."""

from __future__ import annotations

import gc
import json
import statistics
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from optimum_neuron import progress

from ..machine import OtherProcesses, describe_machine
from ..output import console, drawing, make_table
from .servers import OurServer, Server
from .workloads import LONG, PromptSource, Stall, Trace, Workload


COLORS = {"token_generation": "#4c72b0", "chunked_prefill": "#dd8452", "mixed": "#55a868"}


@dataclass
class Results:
    """All results of one run.

    Attributes:
        benchmark: the command that made them.
        numbers: by scenario and system, medians over the rounds.
        padding: by scenario and system, the share of chunk tokens that were padding, and the calls of each graph.
        traces: of the last round, by scenario and system.
        other_cores: cores that other processes kept busy, by scenario.
        steps: median times of the last round's steps, by kind.
        ratios: what the command compares, by what it calls it.
    """

    benchmark: str
    model: str
    options: dict[str, Any]
    machine: dict[str, Any]
    numbers: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    padding: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    workloads: dict[str, dict[str, Any]] = field(default_factory=dict)
    other_cores: dict[str, float | None] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    ratios: dict[str, float] = field(default_factory=dict)
    traces: dict[str, dict[str, Trace]] = field(default_factory=dict)

    @classmethod
    def of(cls, benchmark: str, checkpoint: str, args: Namespace) -> Results:
        options = {name: value for name, value in vars(args).items() if not isinstance(value, Path)}
        return cls(benchmark, Path(checkpoint).name, options, describe_machine())

    def measure(
        self, scenario: str, workload: Workload, servers: Sequence[Server], warm_up: Workload | None = None
    ) -> None:
        """Lets each server run the workload, or what warms it up, once and then, round after round, all in turn."""
        rounds: dict[str, list[dict[str, float]]] = {server.name: [] for server in servers}
        self.traces[scenario] = {}
        repeats = self.options["repeats"]
        vocab_size = servers[0].vocab_size
        # As servers do: or else the collector looks through all that was loaded, in the middle of a step.
        gc.collect()
        gc.freeze()
        with progress.stage(f"Measuring {scenario}", len(servers) * (repeats + 1)) as advance:
            others = OtherProcesses()
            for number in range(repeats + 1):
                # Each round begins with another system: what runs after a slow one finds colder caches.
                for server in [*servers[number % len(servers) :], *servers[: number % len(servers)]]:
                    prompts = PromptSource(vocab_size, self.options["seed"] + number)
                    served = workload if number or warm_up is None else warm_up
                    trace = server.serve(served.jobs(prompts))
                    advance(server.name)
                    if number:
                        rounds[server.name].append(workload.results(trace))
                    self.traces[scenario][server.name] = trace
        gc.unfreeze()
        self.other_cores[scenario] = others.cores()
        for server in servers:
            if isinstance(server, OurServer):
                self.steps += _step_times(server, self.traces[scenario][server.name])
        self.workloads[scenario] = asdict(workload)
        self.numbers[scenario] = {name: _medians(results) for name, results in rounds.items()}
        self.padding[scenario] = {
            name: _padding(trace.counters)
            for name, trace in self.traces[scenario].items()
            if "prompt_tokens" in trace.counters
        }

    def to_json(self) -> str:
        """One line."""
        fields = {key: value for key, value in vars(self).items() if key != "traces"}
        return json.dumps(fields, default=str)


def _medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


def _step_times(server: OurServer, trace: Trace) -> list[dict[str, Any]]:
    sizes = server.model.neuron_config
    times: dict[str, list[float]] = {}
    for kind, start, end in trace.steps:
        times.setdefault(kind, []).append((end - start) * 1e3)
    return [
        {
            "kind": kind,
            "batch_size": sizes.batch_size,
            "ctx_batch_size": sizes.ctx_batch_size,
            "chunk_size": 0 if kind == "token_generation" else sizes.prefill_chunk_size,
            "ms": statistics.median(of_kind),
        }
        for kind, of_kind in times.items()
    ]


def _padding(counters: dict[str, Any]) -> dict[str, Any]:
    real, padded = counters["prompt_tokens"], counters["padded_prompt_tokens"]
    share = padded / (real + padded) if real + padded else 0.0
    return {"padded_share": share, "graph_calls": counters["graph_calls"]}


def print_tables(results: Results) -> None:
    """One table per scenario, then the ratios."""
    out, machine = console(), results.machine
    out.print(
        f"{results.model}, {results.options['dtype']}, {machine['cpu']}, {machine['threads']} threads, torch "
        f"{machine['torch']}, transformers {machine['transformers']}, medians of {results.options['repeats']} rounds"
    )
    for scenario, systems in results.numbers.items():
        sizes = ", ".join(f"{key} {value}" for key, value in results.workloads[scenario].items())
        names = list(dict.fromkeys(name for numbers in systems.values() for name in numbers))
        titles = [name.replace("_ms", " ms").replace("tok_s", "tok/s").replace("_", " ") for name in names]
        table = make_table(f"{scenario}: {sizes}", ("system",), (*titles, "padding"))
        for system, numbers in systems.items():
            padding = results.padding[scenario].get(system)
            share = f"{padding['padded_share']:.0%}" if padding else ""
            cells = [f"{numbers[name]:,.1f}" if name in numbers else "" for name in names]
            table.add_row(system, *cells, share)
        out.print(table)
    table = make_table("What it is worth", ("ratio",), ("",))
    for name, value in results.ratios.items():
        table.add_row(name, f"{value:.2f}")
    if table.rows:
        out.print(table)


def plot(results: Results, path: Path) -> None:
    """A line per system: its steps around the arrival of the long prompt, by kind, and the newcomer's first token."""
    traces = {name: trace for name, trace in results.traces.get("stall", {}).items() if LONG in trace.submitted}
    if not traces:
        return
    window = (-0.3, max(trace.ttft(LONG) for trace in traces.values()) * 1.1)
    stall = Stall(**results.workloads["stall"])
    with drawing(path, figsize=(11, 0.9 + 0.6 * len(traces))) as (_, axes):
        for row, trace in enumerate(traces.values()):
            _plot_steps(axes, row, trace, window)
        axes.axvline(0, color="k", lw=1)
        axes.set_yticks(range(len(traces)), list(traces))
        axes.invert_yaxis()
        axes.set_xlim(window)
        axes.set(
            xlabel=f"seconds from the arrival of a prompt of {stall.long_prompt:,} tokens beside {stall.decodes} decoding "
            f"requests"
        )
        _add_legend(axes)


def _plot_steps(axes: Any, row: int, trace: Trace, window: tuple[float, float]) -> None:
    came = trace.submitted[LONG]
    for kind, color in COLORS.items():
        spans = [(start - came, end - start) for step, start, end in trace.steps if step == kind]
        shown = [span for span in spans if window[0] < span[0] < window[1]]
        axes.broken_barh(shown, (row - 0.3, 0.6), color=color, ec="w", lw=0.3)
    if not trace.steps:  # no steps are told: a mark per token of one decoding request
        times = [time - came for time in trace.tokens["decode0"] if window[0] < time - came < window[1]]
        axes.plot(times, [row] * len(times), "|", color="0.3", ms=12)
    axes.plot([trace.ttft(LONG)], [row], marker="v", color="k", ms=8)


def _add_legend(axes: Any) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    names = {"token_generation": "decode", "chunked_prefill": "prompt chunk", "mixed": "both"}
    handles = [Patch(color=color, label=names[kind]) for kind, color in COLORS.items()]
    first = Line2D([], [], marker="v", color="k", ls="", label="its first token")
    axes.legend(handles=[*handles, first], frameon=False, ncols=4, loc="lower right", bbox_to_anchor=(1, 1))
