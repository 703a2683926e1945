# SPDX-License-Identifier: Apache-2.0
"""Reads what `vllm bench serve` measured, and shows it: a table, ratios, a plot and JSON. Measures nothing."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..machine import describe_machine
from ..output import console, drawing, make_table
from .servers import ALL_CHUNKS


COLUMNS = {
    "ttft_p50_ms": "TTFT p50 ms",
    "ttft_p99_ms": "TTFT p99 ms",
    "itl_p50_ms": "ITL p50 ms",
    "itl_p99_ms": "ITL p99 ms",
    "itl_max_ms": "ITL max ms",
    "output_tok_s": "new tok/s",
    "total_tok_s": "all tok/s",
    "failed": "failed",
}
COLORS = ("#55a868", "#dd8452", "#4c72b0")


def summarize(rounds: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The numbers of one system under one load, from the detailed results of its rounds.

    Percentiles are over all requests, and over all single pauses between two tokens of a request, of all rounds. Tokens
    per second are all tokens over the time from the first request to the last token. A failed request counts as such only.

    Raises:
        RuntimeError: every request failed.
    """
    ttfts: list[float] = []
    gaps: list[float] = []
    seconds, prompt_tokens, new_tokens, failed, chunks = 0.0, 0, 0, 0, 0
    for result in rounds:
        seconds += result["duration"]
        each = zip(
            result["errors"],
            result["ttfts"],
            result["itls"],
            result["input_lens"],
            result["output_lens"],
            strict=True,
        )
        for error, ttft, pauses, prompt, generated in each:
            if error or not generated:
                failed += 1
                continue
            ttfts.append(ttft)
            gaps += pauses
            chunks += 1 + len(pauses)
            prompt_tokens += prompt
            new_tokens += generated
    if not gaps:
        errors = [error for result in rounds for error in result["errors"] if error]
        raise RuntimeError(
            f"all {failed} requests failed: {errors[0].strip().splitlines()[-1] if errors else 'no tokens'}"
        )
    return {
        "ttft_p50_ms": 1e3 * float(np.median(ttfts)),
        "ttft_p99_ms": 1e3 * float(np.quantile(ttfts, 0.99)),
        "itl_p50_ms": 1e3 * float(np.median(gaps)),
        "itl_p99_ms": 1e3 * float(np.quantile(gaps, 0.99)),
        "itl_max_ms": 1e3 * max(gaps),
        "output_tok_s": new_tokens / seconds,
        "total_tok_s": (prompt_tokens + new_tokens) / seconds,
        "failed": failed,
        "requests": len(ttfts) + failed,
        "tokens_a_message": new_tokens / chunks,
    }


@dataclass
class Results:
    """All results of one run.

    Attributes:
        systems: in the order in which they are shown.
        baseline: the system that the others are compared with.
        rounds: detailed results of `vllm bench serve`, by load and system.
    """

    model: str
    systems: list[str]
    baseline: str
    options: dict[str, Any]
    machine: dict[str, Any]
    rounds: dict[str, dict[str, list[dict[str, Any]]]] = field(default_factory=dict)

    @classmethod
    def of(cls, model: str, systems: Sequence[str], args: Namespace, versions: Mapping[str, str]) -> Results:
        """No results yet."""
        options = {name: value for name, value in vars(args).items() if not isinstance(value, Path)}
        return cls(Path(model).name, list(systems), ALL_CHUNKS, options, describe_machine() | dict(versions))

    def add(self, load: str, system: str, result: dict[str, Any]) -> None:
        """Keeps what one call of the client measured."""
        self.rounds.setdefault(load, {}).setdefault(system, []).append(result)

    def numbers(self) -> dict[str, dict[str, dict[str, float]]]:
        """By load and system, over all rounds."""
        return {
            load: {system: summarize(found[system]) for system in self.systems if system in found}
            for load, found in self.rounds.items()
        }

    def ratios(self) -> dict[str, dict[str, dict[str, float]]]:
        """By load and system, how much better than the baseline: above 1 is better."""
        return {
            load: {
                name: _better(found, systems[self.baseline])
                for name, found in systems.items()
                if name != self.baseline
            }
            for load, systems in self.numbers().items()
            if self.baseline in systems
        }

    def to_json(self) -> str:
        """One line. Of each round the numbers, not the single pauses."""
        by_round = {
            load: {system: [summarize([one]) for one in rounds] for system, rounds in systems.items()}
            for load, systems in self.rounds.items()
        }
        found = {"numbers": self.numbers(), "ratios": self.ratios(), "rounds": by_round}
        return json.dumps({"benchmark": "serve", **vars(self), **found}, default=str)


def _better(found: Mapping[str, float], baseline: Mapping[str, float]) -> dict[str, float]:
    less = ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "itl_max_ms")
    more = ("output_tok_s", "total_tok_s")
    return {name: baseline[name] / found[name] for name in less} | {
        name: found[name] / baseline[name] for name in more
    }


def print_tables(results: Results) -> None:
    """All systems under all loads, then how much better each is than the baseline."""
    out, options, machine = console(), results.options, results.machine
    out.print(
        f"{results.model}, {options['dtype']}, {machine['cpu']}, {machine['cores']} cores, vLLM {machine['vllm']}, "
        f"torch {machine['torch']}; {options['long_share']:.0%} of the prompts have {_range(options['long_prompt'])} "
        f"tokens, the others {_range(options['short_prompt'])}; {_range(options['new_tokens'])} new tokens; rounds: "
        f"{options['repeats']}"
    )
    table = make_table("Served over HTTP, as vllm bench serve sees it", ("load", "system"), list(COLUMNS.values()))
    for load, systems in results.numbers().items():
        for name, numbers in systems.items():
            cells = (
                f"{numbers[column]:,.0f}" if column == "failed" else _digits(numbers[column]) for column in COLUMNS
            )
            table.add_row(load, name, *cells)
        table.add_section()
    out.print(table)
    columns = [column for column in COLUMNS if column != "failed"]
    headers = [COLUMNS[column].removesuffix(" ms") for column in columns]
    title = f"How much better than {results.baseline}: above 1 is better"
    table = make_table(title, ("load", "system"), headers)
    for load, compared in results.ratios().items():
        for name, ratios in compared.items():
            table.add_row(load, name, *(f"{ratios[column]:.2f}" for column in columns))
        table.add_section()
    if table.rows:
        out.print(table)


def _range(ends: Sequence[int]) -> str:
    return f"{ends[0]:,}-{ends[1]:,}"


def _digits(value: float) -> str:
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def plot(results: Results, path: Path) -> None:
    """Bars by load: the longest pauses, the first token, and new tokens per second."""
    numbers, machine = results.numbers(), results.machine
    panels = {
        "itl_p99_ms": "Pause between two tokens, p99, ms",
        "ttft_p50_ms": "First token, median, ms",
        "output_tok_s": "New tokens per second",
    }
    with drawing(path, len(panels), figsize=(13, 4.2)) as (figure, axes):
        for axis, (name, title) in zip(axes, panels.items(), strict=True):
            _bars(axis, numbers, name)
            axis.set(title=title, yscale="log" if name.endswith("_ms") else "linear")
            axis.margins(y=0.12)
        axes[-1].legend(frameon=False)
        figure.suptitle(
            f"{results.model}, {results.options['dtype']}, {machine['cpu']}, {machine['cores']} cores", fontsize=10
        )


def _bars(axis: Any, numbers: Mapping[str, Mapping[str, Mapping[str, float]]], name: str) -> None:
    systems = list(dict.fromkeys(system for found in numbers.values() for system in found))
    width = 0.8 / len(systems)
    for index, system in enumerate(systems):
        places = [place + (index - (len(systems) - 1) / 2) * width for place in range(len(numbers))]
        values = [found[system][name] for found in numbers.values()]
        bars = axis.bar(places, values, width * 0.92, label=system, color=COLORS[index % len(COLORS)])
        axis.bar_label(bars, fmt="{:,.0f}", fontsize=8, padding=2)
    axis.set_xticks(range(len(numbers)), list(numbers))
