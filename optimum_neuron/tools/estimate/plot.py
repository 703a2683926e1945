# SPDX-License-Identifier: Apache-2.0
"""Draws estimates: memory per core, and speeds of what fits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...targets.neuron.sdk.hardware import GIB
from .report import model_line


if TYPE_CHECKING:
    from .estimate import Estimate, Report

COLORS = {"weights": "tab:blue", "kv_cache": "tab:orange", "activations": "tab:green", "reserve": "tab:gray"}


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
    figure.suptitle(model_line(report), fontsize=10)
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
    peaks = [speed.peak_rate for _, speed in fitting]
    slow, fast = ([speed.rates[end] for _, speed in fitting] for end in (0, 1))
    axes.hlines(places, slow, fast, color="tab:blue", lw=3, label="four models in five")
    axes.plot([speed.expected_rate for _, speed in fitting], places, "o", color="tab:blue", label="expected")
    axes.plot(peaks, places, "o", color="lightsteelblue", label="peak")
    axes.set(xlabel="tokens per second", title=step.capitalize(), xlim=(0, 1.1 * max(peaks, default=1)))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.locator_params(axis="x", nbins=4)
    axes.grid(axis="x", lw=0.4)
    if fitting:
        axes.legend(frameon=False, fontsize=8)
