# SPDX-License-Identifier: Apache-2.0
"""JSON from elsewhere: parsed strictly, and its values checked for types and ranges before any is used.

A check takes a value's name and the value, and raises a ValueError that says both and the allowed values.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from .filesystem import open_regular


Check = Callable[[str, object], None]

# Positions, slots and ids are int32 in every graph: nothing that they count is larger.
LARGEST = 2**31 - 1
# Far above any document of an artifact: a larger one is not read into memory.
LARGEST_DOCUMENT = 64 << 20
_SHOWN = 60


def read_object(path: Path) -> dict[str, Any]:
    """Return a JSON object from a file; raise ValueError if it is none, or too large, and OSError if it cannot be read."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > LARGEST_DOCUMENT:
            raise ValueError(f"it has {size:,} bytes, more than {LARGEST_DOCUMENT:,}")
        return parse_object(file.read(LARGEST_DOCUMENT))


def parse_object(data: bytes) -> dict[str, Any]:
    """Return a JSON object; raise ValueError where a name occurs twice, a number is not finite, or it is none."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_members, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(value, dict):
        raise ValueError(f"it is {_a(value)}, not an object")
    return value


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for name, value in pairs:
        if name in members:
            raise ValueError(f"the name {shown(name)} occurs twice")
        members[name] = value
    return members


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON number")


def first_difference(found: Any, expected: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """Return the first place at which two JSON values differ, with both values there; None if they agree.

    A field that only one of two objects has counts as equal.
    """
    if isinstance(found, dict) and isinstance(expected, dict):
        prefix = f"{name}." if name else ""
        members = [(f"{prefix}{key}", found[key], value) for key, value in expected.items() if key in found]
    elif isinstance(found, list | tuple) and isinstance(expected, list | tuple) and len(found) == len(expected):
        members = [(f"{name}[{index}]", *pair) for index, pair in enumerate(zip(found, expected, strict=True))]
    else:
        same = type(found) is type(expected) and found == expected
        return None if same else (name, found, expected)
    differences = (first_difference(one, other, inner) for inner, one, other in members)
    return next((each for each in differences if each is not None), None)


def shown(value: object) -> str:
    """Return a value in one short line."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _value(accepts: Callable[[Any], bool], wanted: str) -> Check:
    def check_value(name: str, value: object) -> None:
        if not accepts(value):
            raise ValueError(f"{name} is {shown(value)}, not {wanted}")

    return check_value


def whole(least: int, most: int = LARGEST) -> Check:
    """Check a whole number of a range."""
    return _value(
        lambda value: type(value) is int and least <= value <= most, f"a whole number from {least} to {most}"
    )


def number(least: float = -math.inf) -> Check:
    """Check a finite number, whole or not."""
    return _value(
        lambda value: type(value) in (int, float) and -math.inf < value < math.inf and value >= least,
        "a number" if least == -math.inf else f"a number of at least {least}",
    )


def text(pattern: str = r"[^\x00-\x1f\x7f\ud800-\udfff]*") -> Check:
    """Check a text that matches a pattern; by default any without control characters."""
    matches = re.compile(pattern).fullmatch
    return _value(lambda value: isinstance(value, str) and bool(matches(value)), f"a text of the form {pattern}")


def choice(values: Collection[str]) -> Check:
    """Check one of some texts."""
    return _value(lambda value: isinstance(value, str) and value in values, f"one of {', '.join(values)}")


flag: Check = _value(lambda value: isinstance(value, bool), "true or false")
TEXT: Check = text()


def anything(name: str, value: object) -> None:
    """Accept any value: one that is only compared."""


def optional(each: Check) -> Check:
    """Check a value or null."""

    def check_optional(name: str, value: object) -> None:
        if value is not None:
            each(name, value)

    return check_optional


def listed(each: Check) -> Check:
    """Check a list of alike values."""

    def check_listed(name: str, value: object) -> None:
        if not isinstance(value, list):
            raise ValueError(f"{name} is {_a(value)}, not a list")
        for index, member in enumerate(value):
            each(f"{name}[{index}]", member)

    return check_listed


def named(each: Check) -> Check:
    """Check an object of alike values under any names."""

    def check_named(name: str, value: object) -> None:
        if not isinstance(value, dict):
            raise ValueError(f"{name} is {_a(value)}, not an object")
        for member, inner in value.items():
            TEXT(f"a name in {name}", member)
            each(f"{name}[{shown(member)}]", inner)

    return check_named


def record(required: Mapping[str, Check], others: Mapping[str, Check] | None = None, *, closed: bool = False) -> Check:
    """Check an object that has the `required` fields and may have the others, and, if it is `closed`, no further ones."""
    known = {**required, **(others or {})}

    def check_record(name: str, value: object) -> None:
        if not isinstance(value, dict):
            raise ValueError(f"{name} is {_a(value)}, not an object")
        for field in required:
            if field not in value:
                raise ValueError(f"{name} lacks {field}")
        for field, inner in value.items():
            if field in known:
                known[field](f"{name}.{field}", inner)
            elif closed:
                raise ValueError(f"{name} has {shown(field)}, which is none of {', '.join(known)}")

    return check_record


def _a(value: object) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")
