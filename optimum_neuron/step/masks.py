# SPDX-License-Identifier: Apache-2.0
"""What a layer may see, as transformers' mask interface tells it: a rule about positions instead of a tensor.

transformers makes masks by functions that it registers under the name of an attention implementation, from a function
that says which key a query sees. Ours reads that function and hands the attention a `CausalMask`. A model that computes
with its mask (adds biases, selects keys) fails on one by name, instead of being exported without what it computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, runtime_checkable

import torch


class UnsupportedModelError(ValueError):
    """A model does what step graphs cannot; the message completes "<model> cannot be exported: "."""


@dataclass(frozen=True)
class AttentionChunk:
    """A token sees only tokens of its own block of `size` consecutive positions (Llama 4)."""

    size: int


# None: all tokens up to the own one. A number: a sliding window of so many tokens, the own one included.
Window = int | AttentionChunk | None


@runtime_checkable
class Selection(Protocol):
    """Of what a token sees, the keys that a layer attends to."""

    def narrowed(self, mask: CausalMask) -> CausalMask:
        """A mask that leaves of what it left these keys."""


class CausalMask:
    """Stands for an attention mask: every token sees itself and the tokens before it, within a window.

    Attributes:
        window: how far back.
        extra: the name of what else the mask was to do, if anything.
        selection: what a layer has selected of that, if it has.
    """

    def __init__(self, window: Window, extra: str | None = None, selection: Selection | None = None) -> None:
        self.window = window
        self.extra = extra
        self.selection = selection

    @property
    def dtype(self) -> torch.dtype:
        """As of a mask that is added to scores."""
        return torch.float32

    def is_floating_point(self) -> bool:
        return True

    def __add__(self, other: object) -> CausalMask:
        """With what a layer has selected; anything else is a bias."""
        if not isinstance(other, Selection) or self.selection is not None:
            _refuse("applies add to it")
        return other.narrowed(self)

    def visible_window(self) -> Window:
        """Raises UnsupportedModelError where the mask is more than causal within a window."""
        if self.extra is not None:
            raise UnsupportedModelError(f"it masks attention by {self.extra}, which is no causal or windowed mask")
        return self.window

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(f"reads .{name} of it")

    def __getitem__(self, index: object) -> CausalMask:
        """Models cut masks to the keys that there are; a mask by positions fits any number of keys."""
        return self

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        _refuse(f"passes it to {getattr(func, '__name__', func)}")


def _refuse(what: str) -> NoReturn:
    raise UnsupportedModelError(
        f"it computes with its attention mask ({what}): a bias or a choice of keys that the attention interface would not see"
    )


def _operator(name: str) -> Callable:
    def operate(self: CausalMask, other: object = None) -> NoReturn:
        _refuse(f"applies {name.strip('_')} to it")

    return operate


CausalMask.__radd__ = _operator("__radd__")  # type: ignore[attr-defined]
for _name in ("sub", "mul", "and", "or", "truediv"):
    for _prefix in ("__", "__r"):
        setattr(CausalMask, f"{_prefix}{_name}__", _operator(_name))
for _name in (
    "__lt__",
    "__le__",
    "__gt__",
    "__ge__",
    "__eq__",
    "__ne__",
    "__invert__",
    "__neg__",
    "__bool__",
    "__float__",
    "__len__",
):
    setattr(CausalMask, _name, _operator(_name))


def causal_mask(*_: Any, mask_function: Callable | None = None, **__: Any) -> CausalMask:
    """The rule of a mask; takes what transformers gives every function that makes masks."""
    if mask_function is None:
        return CausalMask(None)
    window: Window = None
    causal, others = False, []
    for name, values in _parts(mask_function):
        if name == "causal_mask_function":
            causal = True
        elif name == "sliding_window_overlay":
            window = values["sliding_window"]
        elif name == "chunked_overlay":
            window = AttentionChunk(values["chunk_size"])
        elif name != "packed_sequence_mask_function":  # the rows of a step: a step's own attention tells them apart
            others.append(name)
    if not causal:
        others = others or ["a function that is not causal"]
    return CausalMask(window, ", ".join(others) or None)


def _parts(mask_function: Callable) -> Iterator[tuple[str, dict[str, Any]]]:
    """The functions whose intersection a mask is: the outermost name of each, and what it closes over."""
    code = getattr(mask_function, "__code__", None)
    cells = getattr(mask_function, "__closure__", None) or ()
    values = {} if code is None else dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True))
    name = getattr(mask_function, "__qualname__", type(mask_function).__name__).split(".")[0]
    if name == "and_masks":
        for part in values["mask_functions"]:
            yield from _parts(part)
    elif name == "remap_positions_for_packed_sequence":  # tells a rule the positions, which ours is told anyway
        yield from _parts(values["mask_function"])
    else:
        yield name, values
