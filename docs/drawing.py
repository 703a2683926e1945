# SPDX-License-Identifier: Apache-2.0
"""Drawings as SVG, by text alone: the same numbers give the same file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape


LINE = "#5b6470"
COLORS = ("#4c9be8", "#f2a541", "#5aa85a", "#b05fc9", "#d9534f", "#7a6a58", "#2f7f86")


@dataclass
class Drawing:
    """Shapes on a white ground, readable on dark pages too."""

    width: int
    height: int
    title: str
    shapes: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, width: float, height: float, fill: str, text: str = "", size: int = 12) -> None:
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}" stroke="{LINE}" stroke-width="0.7"/>'
        )
        if text:
            self.text(x + width / 2, y + height / 2 + size * 0.36, text, anchor="middle", size=size)

    def text(
        self, x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, bold: bool = False
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self.shapes.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}"{weight}>{escape(text)}</text>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self.shapes.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{LINE}" stroke-width="1.4" marker-end="url(#head)"/>'
        )

    def svg(self) -> str:
        head = (
            f'<svg viewBox="0 0 {self.width} {self.height}" xmlns="http://www.w3.org/2000/svg" font-family="system-ui, sans-serif" '
            f'fill="#1d2430" role="img"><title>{escape(self.title)}</title>\n<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" '
            f'markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{LINE}"/></marker></defs>\n'
            f'<rect width="{self.width}" height="{self.height}" rx="6" fill="#ffffff"/>\n'
        )
        return head + "\n".join(self.shapes) + "\n</svg>\n"

    def dot(self, x: float, y: float, fill: str) -> None:
        self.shapes.append(f'<circle cx="{x:.1f}" cy="{y:g}" r="4.5" fill="{fill}" fill-opacity="0.85"/>')

    def line(self, x1: float, y1: float, x2: float, y2: float, fill: str = "#d5d9df") -> None:
        self.shapes.append(f'<line x1="{x1:.1f}" y1="{y1:g}" x2="{x2:.1f}" y2="{y2:g}" stroke="{fill}"/>')


@dataclass(frozen=True)
class Panel:
    """Values of several systems, row by row.

    Attributes:
        axis: what the values are, with their unit.
        rows: by the label of a row, the value of each system.
        middle: the value of a line to compare with; the axis is logarithmic.
    """

    title: str
    axis: str
    rows: Mapping[str, Mapping[str, float]]
    middle: float


ROW, LABELS, WIDTH = 22, 190, 760


def dots(title: str, panels: Sequence[Panel]) -> Drawing:
    """Draw panels below each other: a line for each row, a dot for each system."""
    systems = list(dict.fromkeys(name for panel in panels for row in panel.rows.values() for name in row))
    height = 70 + sum(len(panel.rows) * ROW + 78 for panel in panels)
    drawing = Drawing(WIDTH, height, title)
    drawing.text(20, 26, title, bold=True, size=14)
    place = 20.0
    for number, name in enumerate(systems):
        drawing.dot(place + 5, 46, COLORS[number % len(COLORS)])
        drawing.text(place + 14, 50, name, size=11)
        place += 32 + 6.4 * len(name)
    top = 78
    for panel in panels:
        _panel(drawing, panel, systems, top)
        top += len(panel.rows) * ROW + 78
    return drawing


def _panel(drawing: Drawing, panel: Panel, systems: Sequence[str], top: int) -> None:
    values = [value for row in panel.rows.values() for value in row.values()]
    ticks = _powers(values)
    bottom = top + 14 + len(panel.rows) * ROW

    def across(value: float) -> float:
        share = math.log(value / ticks[0]) / math.log(ticks[-1] / ticks[0])
        return LABELS + 10 + (WIDTH - LABELS - 50) * share

    drawing.text(20, top + 4, panel.title, bold=True)
    for tick in ticks:
        x = across(tick)
        drawing.line(x, top + 12, x, bottom, LINE if tick == panel.middle else "#e3e6ea")
        drawing.text(x, bottom + 14, f"{tick:,g}", anchor="middle", size=10)
    for number, (label, row) in enumerate(panel.rows.items()):
        y = top + 14 + (number + 0.5) * ROW
        drawing.text(LABELS, y + 4, label, anchor="end", size=11)
        drawing.line(LABELS + 10, y, WIDTH - 40, y)
        for name, value in row.items():
            drawing.dot(across(value), y, COLORS[systems.index(name) % len(COLORS)])
    drawing.text((LABELS + WIDTH) / 2, bottom + 32, panel.axis, anchor="middle", size=11)


def _powers(values: Sequence[float]) -> list[float]:
    """Return powers of two around all values and 1."""
    least, most = math.floor(math.log2(min(*values, 1))), math.ceil(math.log2(max(*values, 1)))
    return [2.0**power for power in range(least, max(most, least + 1) + 1)]
