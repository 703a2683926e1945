# SPDX-License-Identifier: Apache-2.0
"""Markdown in which text of an artifact is never more than text: it stands in code, where nothing of it means anything."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


_LONGEST = 200


def code(text: object) -> str:
    """Text within a line, also in a cell of a table; what does not print is left out, and a long one is cut."""
    printed = "".join(letter for letter in str(text) if letter.isprintable())
    shown = printed if len(printed) <= _LONGEST else printed[: _LONGEST - 1] + "…"
    if not shown.strip():
        return "-"
    fence = "`" * (_longest_run(shown) + 1)
    padding = " " if shown[0] in "` " or shown[-1] in "` " else ""
    # A cell ends at a bar, also in code, unless it is escaped; a backslash before it would be one more of the text's.
    return f"{fence}{padding}{shown.replace('|', '│')}{padding}{fence}"


def block(text: str, language: str) -> str:
    """Lines of code."""
    printed = "\n".join("".join(letter for letter in line if letter.isprintable()) for line in text.split("\n"))
    fence = "`" * max(3, _longest_run(printed) + 1)
    return f"{fence}{language}\n{printed}\n{fence}\n"


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], numbers: int = 0) -> str:
    """A table of cells that are Markdown already.

    Args:
        numbers: how many of the last columns are aligned to the right.
    """
    texts = len(headers) - numbers
    rule = ["---"] * texts + ["--:"] * numbers
    lines = [headers, rule, *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _longest_run(text: str) -> int:
    """Of backticks."""
    return max(map(len, re.findall("`+", text)), default=0)
