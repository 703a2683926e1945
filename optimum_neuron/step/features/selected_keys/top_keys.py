# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the keys that a layer selected."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from ....errors import UnsupportedModelError
from ...attention.masks import CausalMask
from ...stand_in import StandIn


class TopKeys(StandIn):
    """A stand-in for the keys, or blocks of keys, that a selection left to each token, until attention gets it.

    Attributes:
        selected: `[tokens, heads, columns]` bool, in which heads is 1 where all select the same; None: all that a token sees.
    """

    def __init__(self, selected: Tensor | None) -> None:
        self.selected = selected

    @property
    def indices(self) -> TopKeys:
        return self

    def __iter__(self) -> Iterator[Any]:
        """Yield values and indices, as torch's top-k."""
        yield from (_TopScores(), self)

    def to(self, dtype: torch.dtype) -> TopKeys:
        return self

    def narrow_mask(self, mask: CausalMask) -> CausalMask:
        """Return a mask that leaves these keys of what it left."""
        return CausalMask(mask.window, mask.extra, self)

    def masked_fill(self, mask: object, value: int) -> TopKeys:
        """Mark, by -1, those that code has hidden by minus infinity: none of them was selected."""
        if not isinstance(mask, _Hidden) or value != -1:
            refuse_tensor_use("selected keys", f"fills them with {value}")
        return self

    def refuse_use(self, use: str) -> NoReturn:
        refuse_tensor_use("selected keys", use)


class _Hidden:
    """The selected keys with scores of minus infinity."""


class _TopScores(StandIn):
    """A stand-in for the scores of selected keys, by which code may only find those that it has hidden."""

    pronoun = "their scores"
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> Any:
        if other != -math.inf:
            refuse_tensor_use("selected keys", f"compares their scores with {other}")
        return _Hidden()

    def refuse_use(self, use: str) -> NoReturn:
        refuse_tensor_use("selected keys", use)


def selection_of(mask: object, arguments: Any) -> TopKeys | None:
    """Return the selection in a layer's mask, or among its other arguments to attention."""
    selection = mask.selection if isinstance(mask, CausalMask) else None
    return next((each for each in (selection, *arguments) if isinstance(each, TopKeys)), None)


def refuse_tensor_use(of: str, what: str) -> NoReturn:
    """Raise UnsupportedModelError for code that computes with a stand-in as if it were a tensor."""
    raise UnsupportedModelError(f"it computes with its {of} in code of its own ({what})")
