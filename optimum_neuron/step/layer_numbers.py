# SPDX-License-Identifier: Apache-2.0
"""Numbers of layers: watched while layers are traced, and counted for layers that attend several times."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NoReturn


class IndexUsedError(Exception):
    """A layer's code looked at the number of its layer."""


class WatchedIndex:
    """A stand-in for an int in an attribute of a module: code can pass it on, and any other use raises.

    Attributes:
        used: another use was tried; the caller may have caught its error.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self.used = False

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return int  # for isinstance

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse_use()

    def _refuse_use(self, *_: Any) -> NoReturn:
        self.used = True
        raise IndexUsedError


# Python looks operators up in the class alone. Of those that every object has, these show the number.
_REVEALING = {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__str__"}
for _name in _REVEALING | {name for name in dir(int) if name.startswith("__") and name not in dir(object)}:
    setattr(WatchedIndex, _name, WatchedIndex._refuse_use)


def plain_index(index: Any) -> int:
    """Return the number of a layer, for the step's cache."""
    number: int = index._number if type(index) is WatchedIndex else index
    return number


# Between the numbers of the caches of a layer that attends several times; more than any model's layers.
CALLS_APART = 100_000


@dataclass
class LayerCalls:
    """Numbers of the caches in one forward pass: a layer that attends several times has a cache for each call."""

    counts: dict[int, int] = field(default_factory=dict)

    def number_call(self, layer_idx: int) -> int:
        """Return the number of a call's cache: the layer's own number in its first call."""
        before = self.counts.get(layer_idx, 0)
        self.counts[layer_idx] = before + 1
        return layer_idx + before * CALLS_APART
