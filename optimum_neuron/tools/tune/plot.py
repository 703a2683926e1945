# SPDX-License-Identifier: Apache-2.0
"""Draws a search: each candidate by the tails of both latencies, beside the limits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .report import headline


if TYPE_CHECKING:
    from .tune import Report

MARKERS = {"mixed": "o", "alternate": "s"}


def plot(report: Report, path: Path) -> None:
    """Writes a picture; `check_plot` of cli.py tells whether that can be done."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for policy, marker in MARKERS.items():
        shown = [result for result in report.search.results if result.candidate.policy == policy]
        times = [result.figures.times for result in shown]
        x, y = ([each[metric][99] * 1e3 for each in times] for metric in ("itl", "ttft"))
        axes.scatter(x, y, marker=marker, label=policy, alpha=0.7)
        for result, place in zip(shown, zip(x, y, strict=True), strict=True):
            sizes = result.candidate.config
            label = f"{sizes.batch_size}/{sizes.prefill_chunk_size}"
            axes.annotate(label, place, (4, 4), textcoords="offset points", fontsize=7)
    best = report.search.best.figures.times
    axes.scatter(
        [best["itl"][99] * 1e3], [best["ttft"][99] * 1e3], s=160, facecolors="none", edgecolors="k", label="best"
    )
    for limit in report.slo.limits:
        if limit.metric in ("itl", "ttft"):
            (axes.axvline if limit.metric == "itl" else axes.axhline)(
                limit.seconds * 1e3, color="grey", lw=0.8, ls="--"
            )
    axes.set(xscale="log", yscale="log", xlabel="ITL p99, ms", ylabel="TTFT p99, ms")
    axes.set_title(headline(report), fontsize=8, wrap=True)
    axes.legend(frameon=False, fontsize=8, title="rows/chunk", title_fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
