# SPDX-License-Identifier: Apache-2.0
"""Draws what was measured by the size of a block. Measures nothing."""

from __future__ import annotations

from pathlib import Path

from ..output import drawing
from .report import Results


PANELS = {"tok_s": "new tok/s", "itl_p99_ms": "ITL p99, ms", "unfilled_percent": "cache that is taken and empty, %"}


def plot_sizes(results: Results, path: Path) -> None:
    """A panel for each number, a line for each way to serve, and a dashed one for its slots; nothing of a single size."""
    sizes, systems = sorted(set(results.options["block_sizes"])), results.numbers["users"]
    if len(sizes) < 2:
        return
    with drawing(path, len(PANELS), figsize=(11, 3)) as (_, panels):
        for axes, (number, label) in zip(panels, PANELS.items(), strict=True):
            for color, through in enumerate(results.options["through"]):
                values = [systems[f"{through}: blocks of {size}"].get(number) for size in sizes]
                if None in values:  # vLLM does not tell
                    continue
                axes.plot(range(len(sizes)), values, "o-", color=f"C{color}", label=f"{through}, blocks")
                slots = systems[f"{through}: slots"][number]
                axes.axhline(slots, color=f"C{color}", ls="--", label=f"{through}, slots")
            axes.set_xticks(range(len(sizes)), sizes)
            axes.set(xlabel="tokens of a block", ylabel=label)
            axes.set_ylim(bottom=0)
        panels[0].legend(frameon=False, loc="lower left")
