# SPDX-License-Identifier: Apache-2.0
"""Where things are in the page's pictures, as numbers: the template draws them. Imports nothing that draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .facts import Graph


# Of the grid of graphs, in pixels.
_LABEL, _COLUMN, _ROW, _TOP, _GAP = 96, 208, 46, 30, 6
_KINDS = {"token_generation": "decode", "chunked_prefill": "prefill", "mixed": "mixed", "scoring": "scoring"}


@dataclass(frozen=True)
class Segment:
    """A part of a bar, in percent of the bar's full width."""

    name: str
    start: float
    width: float
    value: int


@dataclass(frozen=True)
class Chip:
    """A graph in the grid: a box with two lines."""

    x: float
    y: float
    width: float
    height: float
    kind: str
    label: str
    tokens: int
    title: str


@dataclass(frozen=True)
class Grid:
    """Graphs by chunk size and context.

    Attributes:
        columns, rows: texts and where they are, across and down.
        cells: x, y, width and height of the boxes behind.
    """

    width: float
    height: float
    columns: tuple[tuple[float, str], ...]
    rows: tuple[tuple[float, str], ...]
    cells: tuple[tuple[float, float, float, float], ...]
    chips: tuple[Chip, ...]


def stack(parts: Mapping[str, int], full: int) -> list[Segment]:
    """The parts of a bar, side by side, where `full` is its whole width."""
    found, start = [], 0.0
    for name, value in parts.items():
        width = 100 * value / full if full else 0.0
        found.append(Segment(name, round(start, 3), round(width, 3), value))
        start += width
    return found


def grid(graphs: Sequence[Graph]) -> Grid:
    """The steps of an artifact: a column for each context, a row for each chunk size, and one for decode rows alone."""
    steps = [each for each in graphs if each.kind in _KINDS]
    contexts = sorted({each.context for each in steps})
    sizes = sorted({each.chunk_size for each in steps})
    together = {
        (size, context): [each for each in steps if (each.chunk_size, each.context) == (size, context)]
        for size in sizes
        for context in contexts
    }
    most = max(map(len, together.values()), default=1)
    column = max(_COLUMN, 84 * most)
    cells, chips = [], []
    for (size, context), members in together.items():
        x, y = _LABEL + contexts.index(context) * (column + _GAP), _TOP + sizes.index(size) * (_ROW + _GAP)
        cells.append((x, y, column, _ROW))
        width = (column - 8 - 4 * (len(members) - 1)) / max(len(members), 1)
        for index, each in enumerate(members):
            place = x + 4 + index * (width + 4)
            title = f"{each.name}: {each.shape}, {each.tokens} tokens"
            chips.append(Chip(place, y + 4, width, _ROW - 8, each.kind, _KINDS[each.kind], each.tokens, title))
    return Grid(
        width=_LABEL + len(contexts) * (column + _GAP),
        height=_TOP + len(sizes) * (_ROW + _GAP),
        columns=tuple(
            (_LABEL + index * (column + _GAP) + column / 2, f"context {context:,}")
            for index, context in enumerate(contexts)
        ),
        rows=tuple(
            (_TOP + index * (_ROW + _GAP) + _ROW / 2 + 4, f"chunk {size:,}" if size else "no chunk")
            for index, size in enumerate(sizes)
        ),
        cells=tuple(cells),
        chips=tuple(chips),
    )
