# SPDX-License-Identifier: Apache-2.0
"""Reads what `vllm bench serve` measured, and shows it. Measures nothing."""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..machine import describe_machine
from ..options import recorded
from ..output import Table, digits
from ..section import Compared, Report, Section
from .load import LONG_PROMPT, LONG_SHARE, NEW_TOKENS, SHORT_PROMPT


OURS, ALL_CHUNKS, VLLM_CPU = "optimum_neuron", "all_chunks", "vllm_cpu"
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
# By load and system, the numbers of each round.
Rounds = dict[str, dict[str, list[dict[str, float]]]]
LABELS = {OURS: "this project", ALL_CHUNKS: "this project, whole prompts in a step", VLLM_CPU: "vLLM's CPU backend"}


def numbers_of(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a round, from the client's result; percentiles of ITL are over all single pauses between two tokens.

    Raises:
        RuntimeError: every request failed.
    """
    if not result["completed"]:
        errors = [error for error in result["errors"] if error]
        reason = errors[0].strip().splitlines()[-1] if errors else "no tokens"
        raise RuntimeError(f"all {len(result['errors'])} requests failed: {reason}")
    return {
        **{f"ttft_p{share}_ms": result[f"p{share}_ttft_ms"] for share in (50, 99)},
        **{f"itl_p{share}_ms": result[f"p{share}_itl_ms"] for share in (50, 99)},
        "itl_max_ms": result["p100_itl_ms"],
        "output_tok_s": result["output_throughput"],
        "total_tok_s": result["total_token_throughput"],
        "failed": len(result["errors"]) - result["completed"],
    }


def make_report(model: str, args: Namespace, versions: Mapping[str, str], rounds: Rounds) -> dict[str, Any]:
    """Return the JSON of a run.

    Args:
        rounds: the numbers of each round, by load and system.
    """
    return {
        "benchmark": "serve",
        "model": Path(model).name,
        "options": recorded(args),
        "machine": describe_machine() | dict(versions),
        "numbers": {
            load: {system: medians(found[system]) for system in LABELS if system in found}
            for load, found in rounds.items()
        },
        "rounds": rounds,
    }


def medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each number; of failed requests the sum."""
    found = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    return {**found, "failed": sum(each["failed"] for each in rounds)}


def tables(report: Report) -> Iterator[Table]:
    """All systems under all loads."""
    table = Table("", ("load", "system"), list(COLUMNS.values()))
    for load, systems in report["numbers"].items():
        for name, numbers in systems.items():
            cells = (
                f"{numbers[column]:,.0f}" if column == "failed" else digits(numbers[column]) for column in COLUMNS
            )
            table.add_row(load, LABELS[name], *cells)
    yield table


def compared(report: Report) -> Iterator[Compared]:
    """This project by its defaults, load by load and number by number."""
    for load, systems in report["numbers"].items():
        for column, title in COLUMNS.items():
            others = {LABELS[name]: found[column] for name, found in systems.items() if name != OURS}
            if column != "failed":
                yield Compared(load, title, systems[OURS][column], others, column.endswith("tok_s"))


def _range(ends: Sequence[int]) -> str:
    return f"{ends[0]:,} to {ends[1]:,}"


ABOUT = f"""`vllm bench serve` sends the same requests to each server. The client shares the cores. ITL is inter-token latency, the pause \
between two tokens of a request. TTFT is the time to the first token. {LONG_SHARE:.0%} of the prompts have {_range(LONG_PROMPT)} tokens, the \
others {_range(SHORT_PROMPT)}; answers have {_range(NEW_TOKENS)}. [How it is measured](../benchmark/README.md#http)."""
SECTION = Section("Serving", ABOUT, tables, compared)
