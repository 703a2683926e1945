# SPDX-License-Identifier: Apache-2.0
"""What was measured, as JSON, as tables and as a picture."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .measure import Decode, Prefill, Spread


if TYPE_CHECKING:
    from rich.console import Console

# Of the JSON: another number where a reader of the one before would misread it.
FORMAT = 1


@dataclass(frozen=True)
class Memory:
    """Bytes: of the weights in the artifact, of the cache and all other state, and the most that this process had of the host's."""

    weights_bytes: int
    state_bytes: int
    host_peak_bytes: int | None


@dataclass(frozen=True)
class Report:
    """Speeds of an artifact on a machine.

    Attributes:
        artifact: its folder.
        config: its sizes and options.
        load_seconds: from its folder to graphs that can run, without the imports of libraries.
        warm_up_seconds: the first run of each graph.
    """

    artifact: str
    config: dict[str, Any]
    machine: dict[str, Any]
    new_tokens: int
    repeat: int
    load_seconds: float
    warm_up_seconds: float
    memory: Memory
    prefill: tuple[Prefill, ...]
    decode: tuple[Decode, ...]

    def to_dict(self) -> dict[str, Any]:
        """The JSON: these fields, those of `measure.py`, and the format's number."""
        return {"format": FORMAT, **dataclasses.asdict(self)}


def print_report(report: Report, terminal: Console) -> None:
    """The tables."""
    from rich.table import Table

    machine, config = report.machine, report.config
    terminal.print(
        f"{report.artifact}: {config['target']}, {config['dtype']}, {config['batch_size']} rows of {config['sequence_length']:,} tokens, "
        f"chunks of {config['prefill_chunk_size']}\n"
        f"{machine['cpu']}, kernels for {machine['kernels']}, {machine['threads']} threads on {machine['cores']} cores; torch "
        f"{machine['torch']}, transformers {machine['transformers']}, optimum-neuron-runtime {machine['optimum_neuron']}",
        soft_wrap=True,
    )
    prompts = Table(
        "prompt tokens", "tok/s", "TTFT, ms", "padding", title="Prefill, a prompt alone", title_justify="left"
    )
    for row in report.prefill:
        prompts.add_row(
            f"{row.prompt_tokens:,}", _told(row.tokens_per_second), _told(row.ttft_ms), f"{row.padding_share:.0%}"
        )
    rows = Table("rows", "tok/s", "step, ms", "ITL p50, ms", "ITL p99, ms", "idle rows", title_justify="left")
    rows.title = f"Decode, after {report.decode[0].context_tokens:,} tokens a row"
    for each in report.decode:
        rows.add_row(
            str(each.rows),
            f"{each.tokens_per_second:,.1f}",
            _told(each.step_ms),
            f"{each.itl_p50_ms:,.2f}",
            f"{each.itl_p99_ms:,.2f}",
            f"{each.idle_share:.0%}",
        )
    for table in (prompts, rows):
        for column in table.columns:
            column.justify, column.no_wrap = "right", True
        terminal.print(table)
    memory = report.memory
    peak = (
        "" if memory.host_peak_bytes is None else f", {memory.host_peak_bytes / 1e6:,.0f} MB of the host at the peak"
    )
    terminal.print(
        f"loaded in {report.load_seconds:.2f} s, warm in {report.warm_up_seconds:.2f} s; {memory.weights_bytes / 1e6:,.0f} MB of "
        f"weights, {memory.state_bytes / 1e6:,.0f} MB of cache and state{peak}\n"
        f"medians of {report.repeat} (least to most), after one that is not counted",
        soft_wrap=True,
    )


def _told(spread: Spread) -> str:
    digits = 0 if spread.median >= 1000 else 1 if spread.median >= 100 else 2
    return f"{spread.median:,.{digits}f} ({spread.min:,.{digits}f} to {spread.max:,.{digits}f})"


def plot(report: Report, path: Path) -> None:
    """Prefill speed by prompt length, and decode speed and time per step by rows."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
    lengths = [row.prompt_tokens for row in report.prefill]
    speeds = [row.tokens_per_second for row in report.prefill]
    _line(axes[0], lengths, speeds, "Prefill", "prompt tokens", "tokens per second")
    rows = [each.rows for each in report.decode]
    axes[1].plot(rows, [each.tokens_per_second for each in report.decode], "o-")
    axes[1].set(title="Decode", xlabel="rows", ylabel="tokens per second, all rows")
    _line(axes[2], rows, [each.step_ms for each in report.decode], "Decode", "rows", "ms per step")
    axes[2].plot(rows, [each.itl_p99_ms for each in report.decode], "k_", label="ITL p99")
    axes[2].legend(frameon=False, fontsize=8)
    for panel, ticks in zip(axes, (lengths, rows, rows), strict=True):
        panel.set_xticks(ticks)
        panel.set_ylim(bottom=0)
        panel.grid(lw=0.4)
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{report.artifact} on {report.machine['cpu']}, {report.machine['threads']} threads", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _line(panel: Any, places: list[int], values: list[Spread], title: str, xlabel: str, ylabel: str) -> None:
    medians = [value.median for value in values]
    errors = [[value.median - value.min for value in values], [value.max - value.median for value in values]]
    panel.errorbar(places, medians, yerr=errors, fmt="o-", capsize=3)
    panel.set(title=title, xlabel=xlabel, ylabel=ylabel)
