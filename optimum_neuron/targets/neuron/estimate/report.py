# SPDX-License-Identifier: Apache-2.0
"""Shows estimates: tables for people, a picture, and a JSON document for programs. Estimates nothing."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..sdk.hardware import EFFICIENCIES, GIB, MIB
from .step_needs import GRAPH_RESERVE, Speed


if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from .estimate import Estimate, Report

# A quarter of the shortest published step: what each step takes beside its arithmetic then weighs four times as much.
_SHORT_STEP_S = 5e-3
COLORS = {"weights": "tab:blue", "kv_cache": "tab:orange", "activations": "tab:green", "reserve": "tab:gray"}


def print_report(report: Report, console: Console) -> None:
    """The model, memory per core, speeds of what fits, and where the figures come from."""
    console.print(_model_line(report), highlight=False)
    console.print(_memory_table(report))
    if any(one.fits for one in report.estimates):
        console.print(_speed_table(report))
    for sentence in sentences(report):
        console.print(sentence, highlight=False)


def _model_line(report: Report) -> str:
    sizes, config = report.sizes, report.estimates[0].config
    used = f", {sizes.active_parameters / 1e9:,.2f} B of them per token" if sizes.has_experts else ""
    return (
        f"{report.model}: {sizes.parameters / 1e9:,.3f} B parameters{used}, {len(sizes.heads)} layers, {sizes.dtype}; batch "
        f"size {config.batch_size}, sequence length {config.sequence_length:,}, chunks of {config.ctx_batch_size} x "
        f"{config.prefill_chunk_size}"
    )


def _memory_table(report: Report) -> Table:
    table = _table("GiB per core; largest sizes with the others as asked")
    for header in ("target", "tp", "weights", "KV", "activ.", "graphs", "total", "of", "fits"):
        table.add_column(header, justify="left" if header in ("target", "fits") else "right", no_wrap=True)
    table.add_column("largest\nbatch", justify="right", no_wrap=True)
    table.add_column("longest\nsequence", justify="right", no_wrap=True)
    table.add_column("smallest host", no_wrap=True)
    for _, group in groupby(report.estimates, lambda one: one.config.target):
        for one in group:
            table.add_row(*_memory_cells(one), style=None if one.fits else "dim")
        table.add_section()
    return table


def _memory_cells(one: Estimate) -> Iterator[str]:
    memory = one.memory
    yield one.config.target
    yield str(one.config.tensor_parallel_size)
    for size in (memory.weights, memory.kv_cache, memory.activations, memory.reserve, memory.total):
        yield f"{size / GIB:,.{2 if size < 100 * GIB else 0}f}"
    yield f"{one.hbm / GIB:.0f}"
    yield "yes" if one.fits else "no"
    for most in (one.largest_batch, one.longest_sequence):
        yield f"{most:,}" if most else "-"
    yield one.hosts[0].name


def _speed_table(report: Report) -> Table:
    table = _table(f"Tokens per second of one copy, all rows in use, {report.context_length:,} tokens in the cache")
    table.add_column("target", no_wrap=True)
    for header in ("tp", "decode\npeak", "decode\nexpected", "decode\nms/step", "prefill\npeak", "prefill\nexpected"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("bound by", no_wrap=True)
    table.add_column("copies per host", no_wrap=True)
    fitting = [one for one in report.estimates if one.fits]
    for _, group in groupby(fitting, lambda one: one.config.target):
        for one in group:
            table.add_row(*_speed_cells(one))
        table.add_section()
    return table


def _table(title: str) -> Table:
    from rich import box
    from rich.table import Table

    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


def _speed_cells(one: Estimate) -> Iterator[str]:
    cores = one.config.tensor_parallel_size
    at_most = "<" if cores > EFFICIENCIES[one.config.target].cores else ""
    yield one.config.target
    yield str(cores)
    yield _rate(one.decode.peak_rate)
    yield at_most + _rate(one.decode.expected_rate)
    yield f"{one.decode.expected_s * 1e3:,.{1 if one.decode.expected_s > 0.01 else 2}f}"
    yield _rate(one.prefill.peak_rate)
    yield at_most + _rate(one.prefill.expected_rate)
    yield f"{one.decode.bound[:3]}, {one.prefill.bound[:3]}"
    ends = dict.fromkeys((one.hosts[0], max(one.hosts, key=lambda host: host.chips)))
    yield ", ".join(f"{host.size} {one.copies(host)}" for host in ends)


def _rate(tokens: float) -> str:
    return f"{tokens:,.0f}" if tokens < 1e6 else f"{tokens / 1e6:,.1f} M"


def sentences(report: Report) -> list[str]:
    """What the tables do not say: the smallest choice or why there is none, assumptions, and sources."""
    fitting = [one for one in report.estimates if one.fits]
    lines = [_smallest(fitting) if fitting else _nearest(report), *report.notes]
    if report.sizes.has_experts:
        lines.append(
            "Peaks count the experts that tokens are routed to; expected speeds all, since the graphs compute all."
        )
    lines.append(
        f"Weights and cache are exact. Graphs take {GRAPH_RESERVE // MIB} MiB each for their code, which is a guess on the "
        f"safe side."
    )
    sources: dict[str, list[str]] = {}
    for one in fitting:
        targets = sources.setdefault(EFFICIENCIES[one.config.target].source, [])
        if one.config.target not in targets:
            targets.append(one.config.target)
    if any(one.config.tensor_parallel_size > EFFICIENCIES[one.config.target].cores for one in fitting):
        lines.append("< marks more cores than were measured: what they lose to collectives is not counted.")
    if any(one.decode.expected_s < _SHORT_STEP_S for one in fitting):
        lines.append(
            "Short steps lose more to the host and to launches than those runs did; that is not counted either."
        )
    for source, targets in sources.items():
        lines.append(
            f"Expected on {', '.join(targets)}: with the efficiency of optimum-neuron's published runs ({source})."
        )
    return lines


def _smallest(fitting: list[Estimate]) -> str:
    one = min(
        fitting, key=lambda one: (one.config.tensor_parallel_size, one.hosts[0].chips, -one.decode.expected_rate)
    )
    config = one.config
    return (
        f"Fewest cores: {one.hosts[0].name}, with --target {config.target} --tensor-parallel-size "
        f"{config.tensor_parallel_size}."
    )


def _nearest(report: Report) -> str:
    one = min(report.estimates, key=lambda one: one.memory.total / one.hbm)
    config, name = one.config, one.hosts[-1].name
    remedies = []
    if one.largest_batch:
        remedies.append(f"--batch-size {one.largest_batch}")
    if one.longest_sequence:
        remedies.append(f"--sequence-length {one.longest_sequence}")
    if config.dtype == "float32":
        remedies.append("--dtype bfloat16")
    remedy = f"try {' or '.join(remedies)}" if remedies else "take a smaller model"
    return (
        f"Nothing fits: the nearest, {config.target} with tensor_parallel_size={config.tensor_parallel_size} ({name}), needs "
        f"{one.memory.total / GIB:,.1f} GiB per core and has {one.hbm / GIB:.0f}; {remedy}."
    )


def to_json(report: Report) -> dict[str, Any]:
    """Everything, in bytes, seconds and tokens per second."""
    sizes = report.sizes
    return {
        "model": report.model,
        "parameters": sizes.parameters,
        "parameters_per_token": sizes.active_parameters,
        "dtype": sizes.dtype,
        "context_length": report.context_length,
        "estimates": [_estimate_json(one) for one in report.estimates],
        "notes": sentences(report),
    }


def _estimate_json(one: Estimate) -> dict[str, Any]:
    return {
        "config": one.config.to_dict(),
        "fits": one.fits,
        "memory": asdict(one.memory) | {"total": one.memory.total, "hbm": one.hbm},
        "largest_batch": one.largest_batch,
        "longest_sequence": one.longest_sequence,
        "decode": _speed_json(one.decode),
        "prefill": _speed_json(one.prefill),
        "hosts": {host.name: {"cores": host.cores, "copies": one.copies(host)} for host in one.hosts},
    }


def _speed_json(speed: Speed) -> dict[str, Any]:
    return asdict(speed) | {"peak_tok_s": speed.peak_rate, "expected_tok_s": speed.expected_rate}


def check_plot(path: Path) -> None:
    """Raises before anything is computed where no picture can be drawn.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: it cannot write such a file.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(f"--plot {path} needs matplotlib, which is not installed; pip install matplotlib")
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        raise ValueError(
            f"--plot {path} does not end with a known type of picture; use .png, or one of {sorted(known)}"
        )


def plot(report: Report, path: Path) -> None:
    """One line per target and tensor parallel size: memory per core, then speeds of what fits."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = report.estimates[::-1]
    labels = [f"{one.config.target} tp{one.config.tensor_parallel_size}" for one in rows]
    figure, axes = pyplot.subplots(
        1, 3, figsize=(13, 1.8 + 0.25 * len(rows)), layout="constrained", sharey=True, width_ratios=(2, 1, 1)
    )
    _plot_memory(axes[0], rows)
    for panel, name in zip(axes[1:], ("decode", "prefill"), strict=True):
        _plot_speed(panel, rows, name)
    axes[0].set_yticks(range(len(rows)), labels)
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(_model_line(report), fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _plot_memory(axes: Any, rows: tuple[Estimate, ...]) -> None:
    places, start = range(len(rows)), [0.0] * len(rows)
    for part, color in COLORS.items():
        sizes = [getattr(one.memory, part) / GIB for one in rows]
        axes.barh(places, sizes, left=start, color=color, label=part.replace("_", " "))
        start = [before + size for before, size in zip(start, sizes, strict=True)]
    limits = [one.hbm / GIB for one in rows]
    axes.plot(limits, places, "k|", markersize=11, markeredgewidth=1.6, label="device memory")
    # Bars of what is far too large end at the edge: they would leave the others no room.
    axes.set(xlim=(0, 1.5 * max(limits)), xlabel="GiB per core", title="Memory")
    axes.legend(frameon=False, fontsize=8)


def _plot_speed(axes: Any, rows: tuple[Estimate, ...], step: str) -> None:
    fitting = [(place, getattr(one, step)) for place, one in enumerate(rows) if one.fits]
    places = [place for place, _ in fitting]
    expected, peaks = ([getattr(speed, name) for _, speed in fitting] for name in ("expected_rate", "peak_rate"))
    axes.hlines(places, expected, peaks, color="lightsteelblue", lw=3)
    axes.plot(expected, places, "o", color="tab:blue", label="expected")
    axes.plot(peaks, places, "o", color="lightsteelblue", label="peak")
    axes.set(xlabel="tokens per second", title=step.capitalize(), xlim=(0, 1.1 * max(peaks, default=1)))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.locator_params(axis="x", nbins=4)
    axes.grid(axis="x", lw=0.4)
    if fitting:
        axes.legend(frameon=False, fontsize=8)
