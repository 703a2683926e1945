# SPDX-License-Identifier: Apache-2.0
"""The pictures of `--plot`: an estimate, a search and a benchmark. Imports matplotlib late."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cli import refuse_existing


if TYPE_CHECKING:
    from .bench.measure import Spread
    from .bench.report import BenchReport
    from .estimate.estimate import Estimate
    from .tune.search import CandidateResult
    from .tune.tune import TuneReport

_GIB = 2**30
_PARTS = {"weights": "tab:blue", "kv_cache": "tab:orange", "activations": "tab:green", "reserve": "tab:gray"}
_MARKERS = {"mixed": "o", "alternate": "s"}


def check_plot(path: Path | None) -> None:
    """Refuse a picture that cannot be drawn, before anything is computed.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: matplotlib cannot write such a file.
        FileExistsError, NotADirectoryError: the file exists, or would lie in no folder.
    """
    if path is None:
        return
    if find_spec("matplotlib") is None:
        raise ImportError(f"--plot {path} needs matplotlib, which is not installed; pip install matplotlib")
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        raise ValueError(
            f"--plot {path} does not end with a known type of picture; use .png, or one of {sorted(known)}"
        )
    refuse_existing("--plot", path)


@contextmanager
def _new_figure(
    path: Path, title: str, panels: int, width: float, height: float, **layout: Any
) -> Iterator[Sequence[Any]]:
    """Yield the axes of panels side by side, and write the picture at the end. Sizes are inches."""
    from matplotlib.figure import Figure

    figure = Figure((width, height), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False, **layout)[0]
    figure.suptitle(title, fontsize=10, wrap=True)
    yield axes
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _add_legend(panel: Any, title: str | None = None) -> None:
    panel.legend(frameon=False, fontsize=8, title=title, title_fontsize=8)


def draw_estimates(estimates: Sequence[Estimate], title: str, path: Path) -> None:
    """Draw a line for each target and tensor parallel size: memory per core, then speeds where the model fits."""
    rows = estimates[::-1]
    labels = [f"{one.config.target} tp{one.config.tensor_parallel_size}" for one in rows]
    height = 1.8 + 0.25 * len(rows)
    with _new_figure(path, title, 3, 13, height, sharey=True, width_ratios=(2, 1, 1)) as axes:
        memory, places, start = axes[0], range(len(rows)), [0.0] * len(rows)
        for part, color in _PARTS.items():
            sizes = [getattr(one.memory, part) / _GIB for one in rows]
            memory.barh(places, sizes, left=start, color=color, label=part.replace("_", " "))
            start = [before + size for before, size in zip(start, sizes, strict=True)]
        limits = [one.hbm / _GIB for one in rows]
        memory.plot(limits, places, "k|", markersize=11, markeredgewidth=1.6, label="device memory")
        # Bars of what is far too large end at the edge: they would leave the others no room.
        memory.set(xlim=(0, 1.5 * max(limits)), xlabel="GiB per core", title="Memory")
        memory.set_yticks(places, labels)
        _add_legend(memory)
        for panel, step in zip(axes[1:], ("decode", "prefill"), strict=True):
            _draw_speed(panel, rows, step)


def _draw_speed(panel: Any, rows: Sequence[Estimate], step: str) -> None:
    fitting = {place: getattr(one, step) for place, one in enumerate(rows) if one.fits}
    places, speeds = list(fitting), fitting.values()
    peaks = [speed.peak_rate for speed in speeds]
    slow, fast = ([speed.rates[end] for speed in speeds] for end in (0, 1))
    panel.hlines(places, slow, fast, color="tab:blue", lw=3, label="four models in five")
    panel.plot([speed.expected_rate for speed in speeds], places, "o", color="tab:blue", label="expected")
    panel.plot(peaks, places, "o", color="lightsteelblue", label="peak")
    panel.set(xlabel="tokens per second", title=step.capitalize(), xlim=(0, 1.1 * max(peaks, default=1)))
    panel.xaxis.set_major_formatter("{x:,.0f}")
    panel.locator_params(axis="x", nbins=4)
    panel.grid(axis="x", lw=0.4)
    if fitting:
        _add_legend(panel)


def draw_search(report: TuneReport, title: str, path: Path) -> None:
    """Draw each candidate by the tails of both latencies, with the limits as lines and a ring around the best."""
    with _new_figure(path, title, 1, 8, 5) as (panel,):
        for policy, marker in _MARKERS.items():
            shown = [each for each in report.search.results if each.candidate.policy == policy]
            places = [_read_tails(each) for each in shown]
            panel.scatter([x for x, _ in places], [y for _, y in places], marker=marker, label=policy, alpha=0.7)
            for each, place in zip(shown, places, strict=True):
                label = f"{each.candidate.config.batch_size}/{each.candidate.config.prefill_chunk_size}"
                panel.annotate(label, place, (4, 4), textcoords="offset points", fontsize=7)
        itl, ttft = _read_tails(report.search.best)
        panel.scatter([itl], [ttft], s=160, facecolors="none", edgecolors="k", label="best")
        for limit in report.slo.limits:
            if limit.metric in ("itl", "ttft"):
                draw_line = panel.axvline if limit.metric == "itl" else panel.axhline
                draw_line(limit.seconds * 1e3, color="grey", lw=0.8, ls="--")
        panel.set(xscale="log", yscale="log", xlabel="ITL p99, ms", ylabel="TTFT p99, ms")
        _add_legend(panel, "rows/chunk")


def _read_tails(result: CandidateResult) -> tuple[float, float]:
    times = result.figures.times
    return times["itl"][99] * 1e3, times["ttft"][99] * 1e3


def draw_bench(report: BenchReport, path: Path) -> None:
    """Draw prefill speed by the length of prompts, and decode speed and time per step by rows."""
    title = f"{report.artifact} on {report.machine['cpu']}, {report.machine['threads']} threads"
    lengths, rows = [each.prompt_tokens for each in report.prefill], [each.rows for each in report.decode]
    with _new_figure(path, title, 3, 12, 3.4) as (prefill, speed, step):
        _draw_spreads(prefill, lengths, [each.tokens_per_second for each in report.prefill])
        speed.plot(rows, [each.tokens_per_second for each in report.decode], "o-")
        _draw_spreads(step, rows, [each.step_ms for each in report.decode])
        step.plot(rows, [each.itl_p99_ms for each in report.decode], "k_", label="ITL p99")
        _add_legend(step)
        prefill.set(title="Prefill", xlabel="prompt tokens", ylabel="tokens per second", xticks=lengths)
        speed.set(title="Decode", xlabel="rows", ylabel="tokens per second, all rows", xticks=rows)
        step.set(title="Decode", xlabel="rows", ylabel="ms per step", xticks=rows)
        for panel in (prefill, speed, step):
            panel.set_ylim(bottom=0)
            panel.grid(lw=0.4)


def _draw_spreads(panel: Any, places: Sequence[int], values: Sequence[Spread]) -> None:
    medians = [value.median for value in values]
    errors = [[value.median - value.min for value in values], [value.max - value.median for value in values]]
    panel.errorbar(places, medians, yerr=errors, fmt="o-", capsize=3)
