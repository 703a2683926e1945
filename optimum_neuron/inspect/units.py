# SPDX-License-Identifier: Apache-2.0
"""Numbers as people read them."""

from __future__ import annotations


_UNITS = ("bytes", "kB", "MB", "GB", "TB")


def bytes_text(size: float) -> str:
    """Bytes in the largest unit of powers of 1000 that leaves a number of 1 or more, with three digits."""
    for unit in _UNITS[:-1]:
        if size < 1000:
            return f"{_three_digits(size)} {unit}"
        size /= 1000
    return f"{size:,.0f} {_UNITS[-1]}"


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.{1 if value >= 10 else 2}f}"
