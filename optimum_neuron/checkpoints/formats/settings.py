# SPDX-License-Identifier: Apache-2.0
"""Settings of a quantization in a config: values of the right types, and patterns of names."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import regex

from ...errors import first_line


Document = Mapping[str, Any]
_Value = TypeVar("_Value")
_WRONG = {
    int: "no whole number", bool: "neither true nor false", str: "no text", list: "no list of texts", dict: "no object",
}  # fmt: skip
# No format has larger ones, and groups are counted in tensors.
_LARGEST_GROUP = 2**20
# A pattern of a published checkpoint takes microseconds.
_SECONDS = 1.0
_MOST_COPIES = 10_000


def _read(document: Document, name: str, kind: type[_Value], default: Any = None) -> _Value:
    """Return a value; `default` where there is none; raise ValueError for a value of another type."""
    value: Any = default if document.get(name) is None else document[name]
    if type(value) is not kind:
        raise ValueError(f"quantization_config names {name}={value!r}, which is {_WRONG[kind]}; correct config.json")
    return value


def take_whole(document: Document, name: str, default: Any = None) -> int:
    """Return a whole number; `default` where the document has no such name."""
    return _read(document, name, int, None if name in document else default)


def take_switch(document: Document, name: str, *, default: bool) -> bool:
    return _read(document, name, bool, default)


def take_text(document: Document, name: str, default: str) -> str:
    """Return a word, in lower case."""
    return _read(document, name, str, default).lower()


def take_texts(document: Document, name: str) -> tuple[str, ...]:
    return tuple(_read({name: each}, name, str) for each in _read(document, name, list, []))


def take_part(document: Document, name: str) -> Document:
    """Return a document in a document, which may be missing."""
    return _read(document, name, dict, {})


def group_size(document: Document, default: int | None = None) -> int | None:
    """Return the inputs that share a scale, None for all inputs of an output (-1); raise ValueError for another value."""
    size = take_whole(document, "group_size", default)
    if size != -1 and not 1 <= size <= _LARGEST_GROUP:
        raise ValueError(
            f"quantization_config names group_size={size}, and a group has 1 to {_LARGEST_GROUP:,} inputs, or all (-1); correct config.json"
        )
    return None if size == -1 else size


def block_of(value: object, where: str) -> tuple[int, int]:
    """Return outputs and inputs of a block; raise ValueError that names the setting for another value."""
    sizes = value if isinstance(value, list | tuple) else []
    if len(sizes) != 2 or not all(type(size) is int and 1 <= size <= _LARGEST_GROUP for size in sizes):
        raise ValueError(f"{where}={value!r}, and a block is outputs and inputs, such as [128, 128]; correct it")
    return (sizes[0], sizes[1])


def begins_with(pattern: str, name: str) -> bool:
    """Return whether a name begins with a match of a regular expression; raise ValueError for a wrong one, or one that takes too long.

    A stranger wrote the pattern: `re` would try exponentially many ways through some, and `regex` stops after a time.
    """
    where = f"quantization_config has the pattern {pattern[:100]!r}"
    # `regex` writes out what is repeated so often, whatever the limit of time.
    if math.prod(max(1, int(count)) for count in re.findall(r"\{(\d{1,9})", pattern)) > _MOST_COPIES:
        raise ValueError(f"{where}, which repeats a part more than {_MOST_COPIES:,} times; correct config.json")
    try:
        return regex.match(pattern, name, timeout=_SECONDS) is not None
    except TimeoutError as error:
        why = f"which takes more than {_SECONDS:g} s for the name {name[:100]!r}"
        raise ValueError(f"{where}, {why}; correct config.json") from error
    except (regex.error, RecursionError, OverflowError, MemoryError) as error:
        raise ValueError(f"{where}: {first_line(error)}; correct config.json") from error
