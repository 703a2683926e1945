# SPDX-License-Identifier: Apache-2.0
"""What a layer has selected, on its way through the model's own code to attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from ...masks import CausalMask, UnsupportedModelError


class TopKeys:
    """Stands for the keys that a selection left to each token, until attention gets it; and for the blocks of keys.

    Attributes:
        selected: `[tokens, heads, columns]` bool, in which heads is 1 where all select the same; None: all that a token sees.
    """

    def __init__(self, selected: Tensor | None) -> None:
        self.selected = selected

    @property
    def indices(self) -> TopKeys:
        return self

    def __iter__(self) -> Iterator[Any]:
        """As torch's top-k: values and indices."""
        yield from (_TopScores(), self)

    def to(self, dtype: torch.dtype) -> TopKeys:
        return self

    def narrowed(self, mask: CausalMask) -> CausalMask:
        """A mask that leaves of what it left these keys."""
        return CausalMask(mask.window, mask.extra, self)

    def masked_fill(self, mask: object, value: int) -> TopKeys:
        """Marks, by -1, those that code has hidden by minus infinity: none of them was selected."""
        if not isinstance(mask, _Hidden) or value != -1:
            refuse("selected keys", f"fills them with {value}")
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        refuse("selected keys", f"reads .{name} of them")

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> NoReturn:
        refuse("selected keys", f"passes them to {getattr(func, '__name__', func)}")


class _Hidden:
    """Tells those of selected keys whose scores are minus infinity."""


class _TopScores:
    """Stands for the scores of selected keys, which nobody reads but to find those that code has hidden."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> Any:
        if other != -math.inf:
            refuse("selected keys", f"compares their scores with {other}")
        return _Hidden()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        refuse("selected keys", f"reads .{name} of their scores")


def selection_of(mask: object, arguments: Any) -> TopKeys | None:
    """The selection in a layer's mask, or among what else it passes to attention beside its queries, keys and values."""
    selection = mask.selection if isinstance(mask, CausalMask) else None
    return next((each for each in (selection, *arguments) if isinstance(each, TopKeys)), None)


def refuse(of: str, what: str) -> NoReturn:
    """Tells of code that computes with what stands for keys, scores or a selection as if it were a tensor."""
    raise UnsupportedModelError(f"it computes with its {of} in code of its own ({what})")
