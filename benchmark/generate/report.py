# SPDX-License-Identifier: Apache-2.0
"""Shows results: a table for people, a plot, and a JSON document for programs. Measures nothing."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from optimum_neuron.bench.measure import Spread

from ..measure import Case
from ..output import console, drawing, make_table
from ..systems import OURS


@dataclass(frozen=True)
class ArtifactReport:
    """What one artifact took to export, and to load in a fresh process."""

    batch_size: int
    sequence_length: int
    chunk_sizes: tuple[int, ...]
    export_s: float | None
    compile_cache: str
    probe: dict[str, float]


@dataclass(frozen=True)
class Report:
    """All results of one run."""

    model: str
    dtype: str
    target: str
    new_tokens: int
    repeats: int
    machine: dict[str, Any]
    artifacts: list[ArtifactReport]
    cases: list[Case]

    def to_json(self) -> str:
        """One line."""
        cases = [{**asdict(case), "ratios": case.ratios()} for case in self.cases]
        return json.dumps({"benchmark": "generate", **asdict(self), "cases": cases})


def print_tables(report: Report) -> None:
    """Medians with (min-max) where a range was measured; a ratio above 1 means that this runtime is faster."""
    out, machine = console(180), report.machine
    out.print(
        f"{report.model}, {report.dtype}, {machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}, "
        f"transformers {machine['transformers']}, {report.new_tokens} new tokens, {report.repeats} rounds"
    )
    out.print(_speed_table(report.cases))
    out.print(_artifact_table(report.artifacts))


def _speed_table(cases: list[Case]) -> Table:
    numbers = ("TTFT ms", "prefill tok/s", "ratio", "ms/step", "tok/s a row", "decode tok/s", "ratio", "equal tokens")
    title = "Median (min-max); ratios are this runtime's, above 1 is faster"
    table = make_table(title, ("rows", "prompt", "system"), numbers)
    for case in cases:
        ratios = case.ratios()
        for name, speed in case.speeds.items():
            ratio, agreement = ratios.get(name), case.agreement.get(name)
            table.add_row(
                str(case.batch_size),
                f"{case.prompt_length:,}",
                name,
                _range(speed.ttft_ms, 0),
                _range(speed.prefill_tok_s, 0),
                f"{ratio['prefill']:.2f}" if ratio else "",
                _range(speed.step_ms, 1),
                f"{speed.decode_tok_s_per_row.median:,.1f}",
                _range(speed.decode_tok_s, 1),
                f"{ratio['decode']:.2f}" if ratio else "",
                f"{agreement.equal_tokens / agreement.tokens:.0%}" if agreement else "",
            )
        table.add_section()
    return table


def _range(spread: Spread, digits: int) -> str:
    return f"{spread.median:,.{digits}f} ({spread.min:,.{digits}f}-{spread.max:,.{digits}f})"


def _artifact_table(artifacts: list[ArtifactReport]) -> Table:
    sizes = ("rows", "cache length", "export s")
    numbers = ("load s", "weights + KV MB", "peak MB", "peak / needed")
    table = make_table("Artifacts, loaded in fresh processes", (), (*sizes, "compile cache", *numbers))
    for artifact in artifacts:
        probe = artifact.probe
        table.add_row(
            str(artifact.batch_size),
            f"{artifact.sequence_length:,}",
            "-" if artifact.export_s is None else f"{artifact.export_s:.1f}",
            artifact.compile_cache,
            f"{probe['load_s']:.2f}",
            f"{(probe['weights_bytes'] + probe['kv_cache_bytes']) / 1e6:,.0f}",
            f"{probe['peak_bytes'] / 1e6:,.0f}",
            f"{probe['peak_to_needed']:.2f}",
        )
    return table


def plot(report: Report, path: Path) -> None:
    """Bars with min-max whiskers: decode by batch size at the middle prompt length, prefill by length at the first batch."""
    lengths = sorted({case.prompt_length for case in report.cases})
    length, rows = lengths[len(lengths) // 2], report.cases[0].batch_size
    decode = {str(case.batch_size): case for case in report.cases if case.prompt_length == length}
    prefill = {f"{case.prompt_length:,}": case for case in report.cases if case.batch_size == rows}
    machine = report.machine
    with drawing(path, 2, figsize=(11, 4.2)) as (figure, (left, right)):
        _bars(left, decode, "decode_tok_s", f"Decode, all rows, prompts of {length:,} tokens", "rows")
        _bars(right, prefill, "prefill_tok_s", f"Prefill, {rows} row{'s' * (rows > 1)}", "prompt tokens")
        right.legend(frameon=False)
        figure.suptitle(f"{report.model}, {report.dtype}, {machine['cpu']}, {machine['threads']} threads", fontsize=10)


def _bars(axes: Any, cases: dict[str, Case], number: str, title: str, label: str) -> None:
    systems = list(next(iter(cases.values())).speeds)
    width = 0.8 / len(systems)
    for index, system in enumerate(systems):
        summaries = [getattr(case.speeds[system], number) for case in cases.values()]
        places = [place + (index - (len(systems) - 1) / 2) * width for place in range(len(cases))]
        medians = [s.median for s in summaries]
        whiskers = [[s.median - s.min for s in summaries], [s.max - s.median for s in summaries]]
        name = system if system == OURS else f"transformers {system}"
        bars = axes.bar(places, medians, width * 0.92, yerr=whiskers, capsize=2, label=name, error_kw={"lw": 0.8})
        axes.bar_label(bars, fmt="{:,.0f}", fontsize=8, padding=2)
    axes.set_xticks(range(len(cases)), list(cases))
    axes.set(title=title, xlabel=label, ylabel="tokens per second")
    axes.margins(y=0.12)
