# SPDX-License-Identifier: Apache-2.0
"""What a config says of a quantization: values of the types that they must have, and patterns of names."""

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
    int: "no whole number",
    bool: "neither true nor false",
    str: "no text",
    list: "no list of texts",
    dict: "no object",
}
# No format has larger ones, and groups are counted in tensors.
_LARGEST_GROUP = 2**20
# A pattern of a published checkpoint takes microseconds.
_SECONDS = 1.0
_MOST_COPIES = 10_000


def _read(document: Document, name: str, kind: type[_Value], default: Any = None) -> _Value:
    """Return a value; `default` where there is none. Raises ValueError where it is of another type."""
    value: Any = default if document.get(name) is None else document[name]
    if type(value) is not kind:
        raise ValueError(f"quantization_config names {name}={value!r}, which is {_WRONG[kind]}; correct config.json")
    return value


def whole(document: Document, name: str, default: Any = None) -> int:
    """Return a whole number; `default` where the document has no such name."""
    return _read(document, name, int, None if name in document else default)


def switch(document: Document, name: str, *, default: bool) -> bool:
    return _read(document, name, bool, default)


def text(document: Document, name: str, default: str) -> str:
    """Return a word, in lower case."""
    return _read(document, name, str, default).lower()


def texts(document: Document, name: str) -> tuple[str, ...]:
    return tuple(_read({name: each}, name, str) for each in _read(document, name, list, []))


def part(document: Document, name: str) -> Document:
    """Return a document in a document, which may be missing."""
    return _read(document, name, dict, {})


def group_size(document: Document, default: int | None = None) -> int | None:
    """Inputs that share a scale; None where all of an output do (-1).

    Raises:
        ValueError: it is no such number.
    """
    size = whole(document, "group_size", default)
    if size != -1 and not 1 <= size <= _LARGEST_GROUP:
        raise ValueError(
            f"quantization_config names group_size={size}, and a group has 1 to {_LARGEST_GROUP:,} inputs, or all of them (-1); "
            f"correct config.json"
        )
    return None if size == -1 else size


def block_of(value: object, where: str) -> tuple[int, int]:
    """Return outputs and inputs of a block. Raises ValueError, naming the setting, where the value is no two sizes."""
    sizes = value if isinstance(value, list | tuple) else []
    if len(sizes) != 2 or not all(type(size) is int and 1 <= size <= _LARGEST_GROUP for size in sizes):
        raise ValueError(
            f"{where}={value!r}, and a block has outputs and inputs, such as [128, 128]; correct config.json"
        )
    return (sizes[0], sizes[1])


def begins(pattern: str, name: str) -> bool:
    """Return whether a name begins with what a regular expression describes.

    Anybody may have written it: `re` would try exponentially many ways through some, where `regex` stops after a time.

    Raises:
        ValueError: it is no expression, or takes too long.
    """
    where = f"quantization_config has the pattern {pattern[:100]!r}"
    # `regex` writes out what is repeated so often, whatever the limit of time.
    if math.prod(max(1, int(count)) for count in re.findall(r"\{(\d{1,9})", pattern)) > _MOST_COPIES:
        raise ValueError(f"{where}, which repeats a part more than {_MOST_COPIES:,} times; correct config.json")
    try:
        return regex.match(pattern, name, timeout=_SECONDS) is not None
    except TimeoutError as error:
        raise ValueError(
            f"{where}, which takes more than {_SECONDS:g} s for the name {name[:100]!r}; correct config.json"
        ) from error
    except (regex.error, RecursionError, OverflowError, MemoryError) as error:
        raise ValueError(f"{where}: {first_line(error)}; correct config.json") from error
