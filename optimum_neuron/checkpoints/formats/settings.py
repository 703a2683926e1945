# SPDX-License-Identifier: Apache-2.0
"""What a config says of a quantization: values of the types that they must have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


Document = Mapping[str, Any]
# No format has larger ones, and groups are counted in tensors.
_LARGEST_GROUP = 2**20


def whole(document: Document, name: str, default: int | None = None) -> int:
    """A whole number; `default` where there is none.

    Raises:
        ValueError: it is something else, or there is neither.
    """
    value = document.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"quantization_config names {name}={value!r}, which is no whole number; correct config.json")
    return value


def switch(document: Document, name: str, *, default: bool) -> bool:
    """True or false; `default` where there is neither."""
    value = document.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(
            f"quantization_config names {name}={value!r}, which is neither true nor false; correct config.json"
        )
    return value


def text(document: Document, name: str, default: str) -> str:
    """A word, in lower case; `default` where there is none."""
    value = document.get(name)
    if value is None:
        return default
    if not isinstance(value, str):
        raise ValueError(f"quantization_config names {name}={value!r}, which is no text; correct config.json")
    return value.lower()


def texts(document: Document, name: str) -> tuple[str, ...]:
    """A list of words, which may be missing."""
    value = document.get(name)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"quantization_config names {name}={value!r}, which is no list of texts; correct config.json")
    return tuple(value)


def part(document: Document, name: str) -> Document:
    """A document in a document, which may be missing."""
    value = document.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"quantization_config names {name}={value!r}, which is no object; correct config.json")
    return value


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
