# SPDX-License-Identifier: Apache-2.0
"""Numbers as people read them."""

from __future__ import annotations


def bytes_text(size: float) -> str:
    """Bytes in the largest unit of powers of 1000 that leaves a number of 1 or more, with three digits."""
    return _scaled(size, ("bytes", "kB", "MB", "GB", "TB"))


def count_text(count: float) -> str:
    """The same of operations."""
    return _scaled(count, ("", "k", "M", "G", "T")).strip()


def _scaled(value: float, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if value < 1000:
            return f"{_three_digits(value)} {unit}"
        value /= 1000
    return f"{value:,.0f} {units[-1]}"


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.{1 if value >= 10 else 2}f}"
