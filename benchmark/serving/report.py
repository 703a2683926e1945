# SPDX-License-Identifier: Apache-2.0
"""Collects and shows what serving measured."""

from __future__ import annotations

import gc
import statistics
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from optimum_neuron import progress

from ..drawing import Drawing, Panel, dots
from ..machine import OtherProcesses, describe_machine
from ..output import Table, digits
from ..section import Compared, Report, Section
from .servers import OurServer, Server
from .workloads import PromptSource, Trace, Workload


MIXED = "mixed"


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

    def to_dict(self) -> dict[str, Any]:
        """JSON-serializable."""
        return {key: value for key, value in vars(self).items() if key != "traces"}


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


def tables(report: Report) -> Iterator[Table]:
    """A table for each scenario."""
    for scenario, systems in report["numbers"].items():
        load = report["workloads"][scenario].items()
        sizes = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in load if not isinstance(value, dict))
        names = list(dict.fromkeys(name for numbers in systems.values() for name in numbers))
        table = Table(f"{scenario} ({sizes})", ("system",), (*map(_title, names), "padding"))
        for system, numbers in systems.items():
            padding = report["padding"][scenario].get(system)
            share = f"{padding['padded_share']:.0%}" if padding else ""
            table.add_row(system, *(digits(numbers.get(name)) for name in names), share)
        yield table


def _title(name: str) -> str:
    words = name.replace("_ms", " ms").replace("tok_s", "tok/s").replace("_", " ")
    return words.replace("ttft", "TTFT").replace("itl", "ITL").replace("percent", "%")


def policies(report: Report) -> Iterator[Compared]:
    """The policy mixed, compared with the others and the peer."""
    for scenario, systems in report["numbers"].items():
        if MIXED in systems:
            yield from _compared(scenario, MIXED, {name: name for name in systems if name != MIXED}, systems)


def blocks_and_slots(report: Report) -> Iterator[Compared]:
    """Each size of blocks, compared with slots of the same memory that serve the same way."""
    systems = report["numbers"]["users"]
    for through in report["options"]["through"]:
        slots = f"{through}: slots"
        for name in systems:
            if name.startswith(f"{through}: ") and name != slots:
                yield from _compared(name, name, {"slots": slots}, systems)


def _compared(
    group: str, ours: str, others: dict[str, str], systems: dict[str, dict[str, float]]
) -> Iterator[Compared]:
    for number, value in systems[ours].items():
        values = {label: systems[name][number] for label, name in others.items() if number in systems[name]}
        if number.endswith(("_ms", "tok_s")):
            yield Compared(group, _title(number), value, values, number.endswith("tok_s"))


def sizes_picture(report: Report) -> Drawing:
    """Throughput, pauses and empty cache, by the size of a block."""
    axes = {
        "tok_s": ("New tokens of all requests", "tokens per second, more is better"),
        "itl_p99_ms": ("The pause that 1 of 100 tokens exceeds", "ms, less is better"),
        "unfilled_percent": ("Cache that requests have and that is empty", "%, less is better"),
    }
    panels = []
    for number, (title, axis) in axes.items():
        rows: dict[str, dict[str, float]] = {}
        for system, numbers in report["numbers"]["users"].items():
            through, _, label = system.partition(": ")
            if number in numbers:
                rows.setdefault(label, {})[through] = numbers[number]
        if rows:
            panels.append(Panel(title, axis, rows))
    return dots("Blocks and slots of the same memory", panels)


STALL = Section(
    "Long prompts among decodes",
    "The engine under each policy, and transformers' continuous batching, on the same prompts. `mixed` is the default. ITL is the pause between "
    "two tokens of a request, TTFT the time to the first token. [What each scenario is](../benchmark/README.md#serving).",
    tables,
    policies,
)
BLOCKS = Section(
    "Blocks",
    "A cache of blocks and slots of the same memory: the requests have very different lengths. ITL is the pause between two tokens of a "
    "request, TTFT the time to the first token. [How it is measured](../benchmark/README.md#blocks).",
    tables,
    blocks_and_slots,
    picture=sizes_picture,
)
