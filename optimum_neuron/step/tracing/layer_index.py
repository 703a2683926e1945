# SPDX-License-Identifier: Apache-2.0
"""A layer's number that nobody but the step's cache may look at: so it is known that the layer's code does not compute with it."""

from __future__ import annotations

from typing import Any, NoReturn


class IndexUsedError(Exception):
    """A layer's code has looked at a number of its layer."""


class WatchedIndex:
    """Stands in for an int in an attribute of a module: it can be passed on, and any other use raises.

    Attributes:
        used: whether there was one, as who called may have caught the error.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self.used = False

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return int  # isinstance asks for it, and gets the answer that the number would give

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse()

    def _refuse(self, *_: Any) -> NoReturn:
        self.used = True
        raise IndexUsedError


# Operators are looked up in the class alone; of those that every object has, these tell what the number is.
_TELLING = {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__str__"}
for _name in _TELLING | {name for name in dir(int) if name.startswith("__") and name not in dir(object)}:
    setattr(WatchedIndex, _name, WatchedIndex._refuse)


def plain_index(index: Any) -> int:
    """The number of a layer, for the step's cache."""
    number: int = index._number if type(index) is WatchedIndex else index
    return number
