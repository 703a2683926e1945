# SPDX-License-Identifier: Apache-2.0
"""Shows results: a table for people, and a JSON document for programs. Measures nothing."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from optimum_neuron.tools.bench.measure import Spread

from ..measure import Case
from ..output import Table, console


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

    def to_dict(self) -> dict[str, Any]:
        """JSON-serializable."""
        cases = [{**asdict(case), "ratios": case.ratios()} for case in self.cases]
        return {"benchmark": "generate", **asdict(self), "cases": cases}


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
    table = Table(title, ("rows", "prompt", "system"), numbers)
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
    table = Table("Artifacts, loaded in fresh processes", (), (*sizes, "compile cache", *numbers))
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
