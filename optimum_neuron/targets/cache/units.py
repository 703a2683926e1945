# SPDX-License-Identifier: Apache-2.0
"""Sizes and ages as people write them. Imports nothing of the project."""

from __future__ import annotations

import re


_BYTES = {"": 1, "b": 1} | {
    letter + ending: base**power
    for power, letter in enumerate("kmgt", 1)
    for ending, base in (("b", 1000), ("ib", 1024))
}
_SECONDS = {"h": 3600, "d": 86400, "w": 604800}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.ASCII)


def parse_size(text: str) -> int:
    """Return the bytes of a size like 10GB, 1.5 TB, 512MiB or 4096; ValueError: it is none."""
    return round(_parse_quantity(text, _BYTES, "size", "500MB, 10GB or 2TiB"))


def parse_age(text: str) -> float:
    """Return the seconds of an age like 12h, 30d or 2w; ValueError: it is none."""
    return _parse_quantity(text, _SECONDS, "age", "12h, 30d or 2w")


def _parse_quantity(text: str, units: dict[str, int], what: str, examples: str) -> float:
    match = _QUANTITY.fullmatch(text.strip().lower())
    if match is None or match[2] not in units or len(match[1]) > 18:
        raise ValueError(f"{text!r} is no {what}; give a number and a unit, as in {examples}")
    return float(match[1]) * units[match[2]]
