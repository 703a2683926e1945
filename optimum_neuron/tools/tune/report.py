# SPDX-License-Identifier: Apache-2.0
"""The report of a search: a sentence, tables of 80 columns, commands to copy, and a JSON document. Computes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ...cli import make_table
from .candidates import export_words, serve_words
from .search import CandidateResult
from .slo import METRICS, PERCENTILES, REMEDIES, time_text
from .tune import TuneReport


_NAMES = {"ttft": "TTFT", "itl": "ITL", "e2e": "whole answer", "queue": "queue"}


def print_report(report: TuneReport, console: Console) -> None:
    """Print the best candidates, their latencies, the sources of the figures, and commands."""
    console.print(headline(report), style="bold")
    console.print(_trace_text(report))
    best = report.search.best
    times = make_table("What users get of the first", ("",), [f"p{percentile}" for percentile in PERCENTILES])
    times.box = None
    for metric in METRICS:
        got = best.figures.times[metric]
        times.add_row(_NAMES[metric], *(time_text(got[percentile]) for percentile in PERCENTILES))
    console.print("", _candidates_table(report), "", times, sep="\n")
    console.print(
        f"{best.figures.tok_s:,.1f} tokens and {best.figures.req_s:,.2f} requests a second, {best.goodput:,.2f} of them within all "
        f"limits; {best.padded:.0%} of prompt tokens are padding, {best.rows_used:.0%} of decode rows are used, steps run for "
        f"{best.busy:.0%} of the time. {best.graphs} graphs compile in {best.compile_minutes:,.1f} minutes and need "
        f"{best.memory / 2**30:,.1f} GiB."
    )
    console.print()
    for sentence in _source_notes(report):
        console.print(sentence)
    console.print()
    for command in commands(report):
        console.print(command, soft_wrap=True)


def headline(report: TuneReport) -> str:
    """Return the best candidate, and whether it meets the limits."""
    best = report.search.best
    if not report.slo.limits:
        return f"Best by throughput: {best.candidate}."
    limits = " and ".join(str(limit) for limit in report.slo.limits)
    if best.meets:
        return f"{best.candidate} meets {limits}, of which it takes {best.worst:.0%}."
    missed = " and ".join(
        f"{time_text(limit.seconds * share)} for the {limit}, {share:.2f} times as much"
        for limit, share in best.used.items()
        if share > 1
    )
    remedies = " or ".join(REMEDIES[limit.metric] for limit, share in best.used.items() if share > 1)
    who = "It misses the limits" if report.grid is None else "Nothing meets all limits. The nearest"
    return f"{who}: {best.candidate} takes {missed}; try {remedies}."


def _trace_text(report: TuneReport) -> str:
    requests = report.trace.requests
    prompts = sum(request.prompt_tokens for request in requests) / len(requests)
    new = sum(request.new_tokens for request in requests) / len(requests)
    seconds = report.trace.seconds
    rate = f", {len(requests) / seconds:,.2f} a second" if seconds else ", all at once"
    shared = "; some prompts start alike" if report.trace.shares_prefixes else ""
    return (
        f"{Path(report.trace.name).name}: {len(requests):,} requests in {time_text(seconds)}{rate}, on average {prompts:,.0f} prompt and "
        f"{new:,.0f} new tokens{shared}."
    )


def _candidates_table(report: TuneReport) -> Table:
    how = "measured on this CPU" if report.machine.is_measured else "predicted, not measured on a device"
    title = f"Simulated by the engine's scheduler; step times {how}"
    headers = ("rows", "chunk", "contexts", "policy", "TTFT\np99", "ITL\np99", "tok/s", "kept", "min", "")
    table = make_table(title, (), headers)
    table.box = None
    for result in report.search.results[:8]:
        sizes, times = result.candidate.config, result.figures.times
        table.add_row(
            str(sizes.batch_size),
            f"{'' if sizes.ctx_batch_size == 1 else f'{sizes.ctx_batch_size}x'}{sizes.prefill_chunk_size}",
            ",".join(map(str, sizes.context_buckets)),
            result.candidate.policy,
            time_text(times["ttft"][99]),
            time_text(times["itl"][99]),
            f"{result.figures.tok_s:,.1f}",
            f"{result.attainment:.0%}",
            f"{result.compile_minutes:,.1f}",
            "meets" if result.meets else f"x {result.worst:.2f}",
        )
    return table


def _source_notes(report: TuneReport) -> Iterator[str]:
    """Yield the sources of times, and what was not compared."""
    yield from report.machine.about
    if report.grid is not None:
        simulated = len(report.search.results)
        why = Counter(
            "need too much memory" if "memory" in pruned.why else "take too long to compile"
            for pruned in report.search.pruned
        )
        left = "".join(f", {count} {reason}" for reason, count in why.items())
        impossible = f", {len(report.refused)} contradict themselves" if report.refused else ""
        yield f"{simulated} candidates were simulated{left}{impossible}."
    yield "'kept' is the share of requests that each keep all limits for themselves, 'min' the minutes of compiling."


def commands(report: TuneReport) -> Iterator[str]:
    best = report.search.best
    if report.grid is None:
        yield serve_words(report.model, best.longest_queue)
        return
    output = f"{Path(report.model).name.removesuffix('.gguf').lower()}-{best.candidate.config.target}/"
    yield export_words(report.model, best.candidate.config, output, report.model_words)
    yield serve_words(output, best.longest_queue)


def to_json(report: TuneReport) -> dict[str, Any]:
    return {
        "model": report.model,
        "trace": {"name": report.trace.name, "requests": len(report.trace.requests), "seconds": report.trace.seconds},
        "slo": [asdict(limit) for limit in report.slo.limits],
        "step_times": "measured" if report.machine.is_measured else "predicted",
        "about": list(report.machine.about),
        "meets": report.search.best.meets,
        "headline": headline(report),
        "commands": list(commands(report)),
        "compile_budget_minutes": report.compile_budget,
        "candidates": [_result_json(result) for result in report.search.results],
        "left_out": [{"config": each.candidate.config.to_dict(), "why": each.why} for each in report.search.pruned],
        "refused": list(report.refused),
    }


def _result_json(result: CandidateResult) -> dict[str, Any]:
    shown = {name: value for name, value in vars(result).items() if name not in ("candidate", "figures", "used")}
    return {
        "config": result.candidate.config.to_dict(),
        "policy": result.candidate.policy,
        "meets": result.meets,
        "used": {f"{limit.metric}.p{limit.percentile:g}": share for limit, share in result.used.items()},
        "goodput": result.goodput,
        **asdict(result.figures),
        **shown,
    }
