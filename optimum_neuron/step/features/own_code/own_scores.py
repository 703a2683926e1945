# SPDX-License-Identifier: Apache-2.0
"""Attention with a bias by column, in code of a model's own.

From the cache such code gets stand-ins for the keys and values of a whole text of `columns` tokens. What it does with them is noted:
products, a factor, a bias, the mask, a softmax. So its own operators become the `AttentionCall` that they mean; others fail by name. A bias
follows from the head and a key's column alone: the code makes it for a whole text, `[heads, 1, columns]`, and it is the same in every step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ....errors import UnsupportedModelError
from ...attention.masks import CausalMask
from ...attention.rows import AttentionBackend, AttentionCall
from ...serving import StandIn, name_of


_Self = TypeVar("_Self", bound="_TextStandIn")


class BiasMask(CausalMask):
    """The mask of a text, minus infinity and zero, into which a model may put a bias `table [1, heads, 1, columns]`."""

    ndim = 4

    def __init__(self, mask: CausalMask, dtype: torch.dtype, table: Tensor | None = None) -> None:
        super().__init__(mask.window, mask.extra)
        self.dtype = dtype
        self.table = table

    def to(self, *_: object, **__: object) -> BiasMask:
        return self

    __getitem__ = __lt__ = to  # less than zero is where a token does not see

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        scores = next((each for each in args if isinstance(each, _TextScores)), None)
        if scores is not None:
            return scores.call_torch(func, args, kwargs or {})
        if name_of(func) == "masked_fill" and isinstance(args[0], Tensor) and isinstance(args[1], BiasMask):
            return BiasMask(args[1], args[1].dtype, args[0])
        return super().__torch_function__(func, types, args, kwargs)


@dataclass(frozen=True)
class _LayerText:
    """One layer's keys and values: the step's own, which the backend writes before it attends."""

    backend: AttentionBackend
    layer_idx: int
    key: Tensor
    value: Tensor


@dataclass(frozen=True)
class _TextStandIn(StandIn):
    """A tensor `[1, *sizes]`, `[*sizes]` with the batch `folded` into the heads, that is never computed; `turned` exchanges the last two."""

    refusal = "it attends by code of its own, which {}: that is no attention with a bias by column"
    call = "calls {0} on {1}"
    text: _LayerText
    sizes: tuple[int, int, int]
    folded: bool = False
    turned: bool = False

    @property
    def shape(self) -> torch.Size:
        heads, rows, columns = self.sizes
        last = (columns, rows) if self.turned else (rows, columns)
        return torch.Size((heads, *last) if self.folded else (1, heads, *last))

    dtype = property(lambda self: self.text.value.dtype)
    device = property(lambda self: self.text.value.device)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def view(self: _Self, *sizes: Any) -> _Self:
        """Fold the batch into the heads, or out of them; also `reshape`."""
        asked = tuple(sizes[0]) if isinstance(sizes[0], tuple | list | torch.Size) else sizes
        for folded in (True, False):
            found = replace(self, folded=folded)
            if len(asked) == len(found.shape) and all(a in (-1, b) for a, b in zip(asked, found.shape, strict=True)):
                return found
        self.refuse_use(f"views {list(self.shape)} as {list(asked)}")

    reshape = view

    def transpose(self: _Self, first: int, second: int) -> _Self:
        dims = len(self.shape)
        if {first % dims, second % dims} != {dims - 1, dims - 2}:
            self.refuse_use(f"exchanges the dimensions {first} and {second} of {list(self.shape)}")
        return replace(self, turned=not self.turned)

    def to(self: _Self, *_: object, **__: object) -> _Self:
        """Return itself: scores are computed in float32."""
        return self

    contiguous = float = type_as = to

    @property
    def pronoun(self) -> str:  # type: ignore[override]
        return str(list(self.shape))


@dataclass(frozen=True)
class _TextKeys(_TextStandIn):
    """Keys `[kv_heads, columns, dim]`: a query's product with them are scores."""

    def call_torch(self, func: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name_of(func) in ("matmul", "bmm") and isinstance(args[0], Tensor) and self.turned:
            return self._score_query(args[0])
        if name_of(func) == "baddbmm" and self.turned:
            bias, query = args[0], kwargs.get("batch1", args[1] if len(args) > 1 else None)
            assert isinstance(query, Tensor)
            beta = kwargs.get("beta", 1)
            return (self._score_query(query) * kwargs.get("alpha", 1)).add_bias(bias if beta == 1 else bias * beta)
        return super().call_torch(func, args, kwargs)

    def _score_query(self, query: Tensor) -> _TextScores:
        folded = query.dim() == 3
        query = query[None] if folded else query
        return _TextScores(self.text, (query.shape[1], query.shape[2], self.sizes[1]), folded, query=query)


@dataclass(frozen=True)
class _TextValues(_TextStandIn):
    """Values `[kv_heads, columns, dim]`."""


@dataclass(frozen=True)
class _TextScores(_TextStandIn):
    """Scores `[heads, tokens, columns]` of a query, to which `bias [heads, columns]` was added, and after the softmax their weights."""

    query: Tensor | None = None
    scaling: float = 1.0
    bias: Tensor | None = None
    mask: BiasMask | None = None
    are_weights: bool = False

    def __mul__(self, factor: object) -> _TextScores:
        if not isinstance(factor, int | float) or self.mask is not None:
            self.refuse_use(f"multiplies scores by {type(factor).__name__}")
        bias = None if self.bias is None else self.bias * factor
        return replace(self, scaling=self.scaling * factor, bias=bias)

    def __truediv__(self, divisor: object) -> _TextScores:
        if not isinstance(divisor, int | float):
            self.refuse_use(f"divides scores by {type(divisor).__name__}")
        return self * (1.0 / divisor)

    def __add__(self, other: object) -> _TextScores:
        if isinstance(other, BiasMask):
            return self.masked_fill(other)
        return self.add_bias(other)

    __radd__ = __add__

    def add_bias(self, table: object) -> _TextScores:
        """Add a bias, `[1, heads, 1, columns]` or without the first dimension."""
        heads, _, columns = self.sizes
        fits = isinstance(table, Tensor) and self.bias is None and table.shape[-3:-1] == (heads, 1)
        if not isinstance(table, Tensor) or not fits or table.shape[-1] > columns:
            self.refuse_use(f"adds {_describe_kind(table)} to scores {list(self.shape)}")
        if table.shape[-1] < columns:
            raise UnsupportedModelError(
                f"it has no bias for more than {table.shape[-1]} tokens of a text, and sequence_length is {columns}; choose a "
                f"sequence_length of at most {table.shape[-1]}"
            )
        return replace(self, bias=table.reshape(heads, columns))

    def masked_fill(self, mask: object, value: object = None) -> _TextScores:
        """Hide what tokens do not see. A mask's bias replaces one that code adds to scores that it computes by itself (Falcon)."""
        if not isinstance(mask, BiasMask) or self.mask is not None:
            self.refuse_use(f"hides scores by {_describe_kind(mask)}")
        masked = self if mask.table is None else replace(self, bias=None).add_bias(mask.table)
        return replace(masked, mask=mask)

    def softmax(self, dim: int = -1, *_: object, **__: object) -> _TextScores:
        if dim % len(self.shape) != len(self.shape) - 1 or self.mask is None or self.are_weights:
            masked = "" if self.mask is not None else " without a mask"
            self.refuse_use(f"takes a softmax{masked} of scores {list(self.shape)}, over dimension {dim}")
        return replace(self, are_weights=True)

    def call_torch(self, func: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name, others = name_of(func), [each for each in args if each is not self]
        if name in ("matmul", "bmm") and isinstance(others[0], _TextValues):
            return self @ others[0]
        if name in ("add", "radd") and len(others) == 1:
            return self + others[0]
        if name == "softmax":
            return self.softmax(kwargs.get("dim", others[0] if others else -1))
        if name == "dropout" and kwargs.get("training") is False:
            return self
        return super().call_torch(func, args, kwargs)

    def __matmul__(self, values: object) -> Tensor:
        """Return `[1, heads, tokens, value_dim]`, or without the first dimension."""
        if not isinstance(values, _TextValues):
            self.refuse_use(f"multiplies scores by {_describe_kind(values)}")
        if not self.are_weights or self.mask is None or self.query is None or values.turned:
            self.refuse_use("multiplies values by scores without a softmax")
        text, window = self.text, self.mask.visible_window()
        call = AttentionCall(
            text.layer_idx, self.query, text.key, text.value, self.scaling, window, None, None, column_bias=self.bias
        )
        output = text.backend.attend(call).transpose(1, 2)
        return output[0] if self.folded else output


def _describe_kind(value: object) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"{type(value).__name__} {list(shape)}"


@dataclass(frozen=True)
class ScoreKeys:
    """The key store of such a model's cache, in which its code finds `columns` tokens, those of the longest text."""

    backend: AttentionBackend
    columns: int

    def store(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Any, Any]:
        text = _LayerText(self.backend, layer_idx, key, value)
        keys, values = (
            kind(text, (each.shape[1], self.columns, each.shape[-1]))
            for kind, each in ((_TextKeys, key), (_TextValues, value))
        )
        return keys, values
