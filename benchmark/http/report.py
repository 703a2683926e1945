# SPDX-License-Identifier: Apache-2.0
"""Reads what `vllm bench serve` measured, and shows it. Measures nothing."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..drawing import Drawing, Panel, dots
from ..machine import describe_machine
from ..output import Table, digits
from ..section import Compared, Report, Section
from .servers import ALL_CHUNKS, OURS, VLLM_CPU


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
LABELS = {OURS: "this project", ALL_CHUNKS: "this project, whole prompts in a step", VLLM_CPU: "vLLM's CPU backend"}


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
        rounds: detailed results of `vllm bench serve`, by load and system.
    """

    model: str
    systems: list[str]
    options: dict[str, Any]
    machine: dict[str, Any]
    rounds: dict[str, dict[str, list[dict[str, Any]]]] = field(default_factory=dict)

    @classmethod
    def of(cls, model: str, systems: Sequence[str], args: Namespace, versions: Mapping[str, str]) -> Results:
        """No results yet."""
        options = {name: value for name, value in vars(args).items() if not isinstance(value, Path)}
        return cls(Path(model).name, list(systems), options, describe_machine() | dict(versions))

    def add(self, load: str, system: str, result: dict[str, Any]) -> None:
        """Keeps what one call of the client measured."""
        self.rounds.setdefault(load, {}).setdefault(system, []).append(result)

    def numbers(self) -> dict[str, dict[str, dict[str, float]]]:
        """By load and system, over all rounds."""
        return {
            load: {system: summarize(found[system]) for system in self.systems if system in found}
            for load, found in self.rounds.items()
        }

    def to_dict(self) -> dict[str, Any]:
        """JSON-serializable. Of each round the numbers, not the single pauses."""
        by_round = {
            load: {system: [summarize([one]) for one in rounds] for system, rounds in systems.items()}
            for load, systems in self.rounds.items()
        }
        return {"benchmark": "serve", **vars(self), "numbers": self.numbers(), "rounds": by_round}


def tables(report: Report) -> Iterator[Table]:
    """All systems under all loads."""
    table = Table("", ("load", "system"), list(COLUMNS.values()))
    for load, systems in report["numbers"].items():
        for name, numbers in systems.items():
            cells = (
                f"{numbers[column]:,.0f}" if column == "failed" else digits(numbers[column]) for column in COLUMNS
            )
            table.add_row(load, LABELS[name], *cells)
        table.add_section()
    yield table


def compared(report: Report) -> Iterator[Compared]:
    """This project by its defaults, load by load and number by number."""
    for load, systems in report["numbers"].items():
        for column, title in COLUMNS.items():
            others = {LABELS[name]: found[column] for name, found in systems.items() if name != OURS}
            if column != "failed":
                yield Compared(load, title, systems[OURS][column], others, column.endswith("tok_s"))


def notes(report: Report) -> Iterator[str]:
    """The load."""
    options = report["options"]
    yield (
        f"{options['long_share']:.0%} of the prompts have {_range(options['long_prompt'])} tokens, the others "
        f"{_range(options['short_prompt'])}; answers have {_range(options['new_tokens'])}. Slots: {options['slots']}; chunks of "
        f"{options['chunk_size']} tokens."
    )


def _range(ends: Sequence[int]) -> str:
    return f"{ends[0]:,} to {ends[1]:,}"


def picture(report: Report) -> Drawing:
    """The longest pauses, the first token, and new tokens per second, by load."""
    axes = {
        "itl_p99_ms": ("The pause that 1 of 100 tokens exceeds", "ms, less is better"),
        "ttft_p50_ms": ("Time to the first token, median", "ms, less is better"),
        "output_tok_s": ("New tokens of all requests", "tokens per second, more is better"),
    }
    panels = []
    for column, (title, axis) in axes.items():
        rows = {
            load: {LABELS[name]: found[column] for name, found in systems.items()}
            for load, systems in report["numbers"].items()
        }
        panels.append(Panel(title, axis, rows))
    return dots("Served over HTTP, a part of the prompts long", panels)


ABOUT = """`vllm bench serve` sends the same requests to each server. The client shares the cores. ITL is inter-token latency, the pause \
between two tokens of a request. TTFT is the time to the first token. [How it is measured](../benchmark/README.md#http)."""
SECTION = Section("Serving", ABOUT, tables, compared, notes, picture)
