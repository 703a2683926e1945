# SPDX-License-Identifier: Apache-2.0
"""Attention masks as rules instead of tensors.

transformers makes masks from a function that says which key a query sees. Ours reads that function and hands the attention a `CausalMask`.
A model that computes with its mask (adds biases, selects keys) is refused by name, instead of being exported without what it computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from ...errors import UnsupportedModelError
from ..serving import StandIn


@dataclass(frozen=True)
class AttentionChunk:
    size: int


# None: all tokens up to the own one. A number: a sliding window of so many tokens, the own one included.
Window = int | AttentionChunk | None


@runtime_checkable
class Selection(Protocol):
    """The keys that a layer attends to, of those that a token sees."""

    def narrow_mask(self, mask: CausalMask) -> CausalMask:
        """Return the mask with this selection."""


class CausalMask(StandIn):
    """A stand-in for a mask of the past within a window, and of a layer's `selection`. `extra` names anything else that it was to do."""

    pronoun = "it"
    refusal = "it computes with its attention mask ({}): a bias or a choice of keys that the attention interface would not see"
    dtype = torch.float32  # of a mask that is added to scores

    def __init__(self, window: Window, extra: str | None = None, selection: Selection | None = None) -> None:
        self.window = window
        self.extra = extra
        self.selection = selection

    def is_floating_point(self) -> bool:
        return True

    def __add__(self, other: object) -> CausalMask:
        """Return the mask with a layer's selection; anything else is a bias."""
        if not isinstance(other, Selection) or self.selection is not None:
            self.refuse_use("applies add to it")
        return other.narrow_mask(self)

    def visible_window(self) -> Window:
        """Return the window; raise UnsupportedModelError where the mask is more than causal within a window."""
        if self.extra is not None:
            raise UnsupportedModelError(f"it masks attention by {self.extra}, which is no causal or windowed mask")
        return self.window

    def __getitem__(self, index: object) -> CausalMask:
        """Return the mask: models cut masks to the keys that there are, and one by positions fits any number of keys."""
        return self


_ONE_WAY = ("radd", "lt", "le", "gt", "ge", "eq", "ne", "invert", "neg", "bool", "float", "len")
_BOTH_WAYS = ("sub", "mul", "and", "or", "truediv")
for _name in (*_ONE_WAY, *_BOTH_WAYS, *(f"r{name}" for name in _BOTH_WAYS)):
    setattr(CausalMask, f"__{_name}__", lambda self, *_, name=_name: self.refuse_use(f"applies {name} to it"))


def causal_mask(*_: Any, mask_function: Callable | None = None, **__: Any) -> CausalMask:
    """Return the rule of a mask; takes what transformers gives every function that makes masks."""
    if mask_function is None:
        return CausalMask(None)
    window: Window = None
    causal, others = False, []
    for name, values in _list_parts(mask_function):
        if name == "causal_mask_function":
            causal = True
        elif name == "sliding_window_overlay":
            window = values["sliding_window"]
        elif name == "chunked_overlay":
            window = AttentionChunk(values["chunk_size"])
        elif name != "packed_sequence_mask_function":  # a step's own attention keeps rows apart
            others.append(name)
    if not causal:
        others = others or ["a function that is not causal"]
    return CausalMask(window, ", ".join(others) or None)


def _list_parts(mask_function: Callable) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the functions that a mask is the intersection of: the outermost name of each, and what it closes over."""
    code = getattr(mask_function, "__code__", None)
    cells = getattr(mask_function, "__closure__", None) or ()
    values = {} if code is None else dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True))
    name = getattr(mask_function, "__qualname__", type(mask_function).__name__).split(".")[0]
    if name == "and_masks":
        for part in values["mask_functions"]:
            yield from _list_parts(part)
    elif name == "remap_positions_for_packed_sequence":  # positions, which our rule gets anyway
        yield from _list_parts(values["mask_function"])
    else:
        yield name, values
