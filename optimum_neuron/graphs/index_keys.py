# SPDX-License-Identifier: Apache-2.0
"""Sparse selection as transformers' layers write it: index keys that the cache keeps, scores over them, and the largest of these.

A layer's indexer hands its keys to the cache, multiplies its queries by all that it gets back, adds the mask and takes the top-k.
A step's tokens are of several slots, so the cache returns `IndexKeys`: a product with them gives each token the scores over
its own slot's keys. Between the product and the top-k all is the model's own code, on tensors; what comes out is `TopKeys`, which
the attention interface gets and which nobody else can read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from .masks import CausalMask, UnsupportedModelError


# Columns that a layer's selection is asked about: more than a token of any model attends to.
ASKED_COLUMNS = 1 << 16


class KeySource(Protocol):
    """The index keys of each token's own slot."""

    @property
    def columns(self) -> int:
        """How many a slot has room for; 1, without meaning, where nothing can be left out."""

    def products(self, query: Tensor) -> Tensor:
        """From `query [tokens, n, dim]` to its products `[tokens, n, columns]` with the keys, in the query's type."""

    def top(self, scores: Tensor, mask: CausalMask | None, count: int) -> Any:
        """What stands for the columns of the largest `scores [tokens, columns]`, so many, of what each token sees.

        Args:
            mask: what was added to the scores.
        """


class IndexBackend(Protocol):
    """Keeps the index keys of a step."""

    def keep_index(self, layer_idx: int, keys: Tensor) -> KeySource:
        """Takes `keys [tokens, dim]` of the step's tokens."""


class AskedKeys:
    """Keys of so many columns that a selection tells how many it takes."""

    columns = ASKED_COLUMNS

    def __init__(self, tell: Callable[[int], None]) -> None:
        self._tell = tell

    def products(self, query: Tensor) -> Tensor:
        return query.new_zeros((*query.shape[:2], self.columns))

    def top(self, scores: Tensor, mask: CausalMask | None, count: int) -> TopKeys:
        self._tell(count)
        return TopKeys(None)


class IndexKeys:
    """Stands for the index keys `[1, columns, dim]` of each token's slot, with the step's tokens in it."""

    def __init__(
        self, source: KeySource, dim: int, dtype: torch.dtype, axes: tuple[str, ...] = ("batch", "columns", "dim")
    ) -> None:
        self._source = source
        self._dim = dim
        self.dtype = dtype
        self._axes = axes

    @classmethod
    def kept(cls, backend: IndexBackend, layer_idx: int, keys: Tensor) -> IndexKeys:
        """Those of `keys [1, tokens, dim]` and of all tokens before them."""
        if keys.dim() != 3:
            raise UnsupportedModelError(f"layer {layer_idx} keeps index keys of shape {list(keys.shape)}")
        return cls(backend.keep_index(layer_idx, keys[0]), keys.shape[-1], keys.dtype)

    @property
    def shape(self) -> torch.Size:
        sizes = {"batch": 1, "one": 1, "columns": self._source.columns, "dim": self._dim}
        return torch.Size([sizes[axis] for axis in self._axes])

    def transpose(self, one: int, other: int) -> IndexKeys:
        axes = list(self._axes)
        axes[one], axes[other] = axes[other], axes[one]
        return type(self)(self._source, self._dim, self.dtype, tuple(axes))

    def unsqueeze(self, place: int) -> IndexKeys:
        axes = list(self._axes)
        axes.insert(place if place >= 0 else len(axes) + 1 + place, "one")
        return type(self)(self._source, self._dim, self.dtype, tuple(axes))

    def to(self, dtype: torch.dtype) -> IndexKeys:
        return type(self)(self._source, self._dim, dtype, self._axes)

    def float(self) -> IndexKeys:
        return self.to(torch.float32)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse("index keys", f"reads .{name} of them")

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> IndexScores:
        if func not in (torch.matmul, Tensor.matmul, Tensor.__matmul__) or kwargs or not isinstance(args[0], Tensor):
            _refuse("index keys", f"passes them to {getattr(func, '__name__', func)}")
        query, keys = args
        if keys._axes != ("batch", "one", "dim", "columns") or query.dim() != 4 or query.dtype != keys.dtype:
            _refuse(
                "index keys", f"multiplies {query.dtype} {list(query.shape)} by them as {keys._axes} of {keys.dtype}"
            )
        return IndexScores(keys._source.products(query[0])[None], keys._source)


class IndexScores:
    """Scores `[1, tokens, ..., columns]` of each token over its own slot's keys: a tensor that knows what it is of."""

    def __init__(self, tensor: Tensor, source: KeySource, mask: CausalMask | None = None) -> None:
        self._tensor = tensor
        self._source = source
        self._mask = mask

    @property
    def shape(self) -> torch.Size:
        return self._tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._tensor.dtype

    @property
    def device(self) -> torch.device:
        return self._tensor.device

    def topk(self, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        return torch.topk(self, k, dim, largest)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not callable(getattr(Tensor, name, None)):
            raise AttributeError(name)
        return partial(_applied, getattr(Tensor, name), self)

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func is torch.topk:
            return args[0]._top(*args[1:], **(kwargs or {}))
        return _applied(func, *args, **(kwargs or {}))

    def _top(self, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        if dim not in (-1, self._tensor.dim() - 1) or not largest:
            _refuse("index scores", f"selects the {'largest' if largest else 'smallest'} of dimension {dim}")
        if self._tensor.dim() != 3:
            _refuse("index scores", f"selects of {list(self.shape)} of them")
        return self._source.top(self._tensor[0].float(), self._mask, k)


def _applied(func: Callable, *args: Any, **kwargs: Any) -> Any:
    """A function of scores, on tensors. A mask may be added to them, and then stands beside them."""
    scores = next(each for each in args if isinstance(each, IndexScores))
    masks = [each for each in args if isinstance(each, CausalMask)]
    if masks:
        if getattr(func, "__name__", "") not in ("add", "__add__", "__radd__") or scores._mask is not None:
            _refuse("index scores", f"passes them and its attention mask to {getattr(func, '__name__', func)}")
        return IndexScores(scores._tensor, scores._source, masks[0])
    plain = (each._tensor if isinstance(each, IndexScores) else each for each in args)
    output = func(*plain, **kwargs)
    if not isinstance(output, Tensor):
        _refuse("index scores", f"passes them to {getattr(func, '__name__', func)}")
    return IndexScores(output, scores._source, scores._mask)


def _operator(name: str) -> Callable:
    def operate(self: IndexScores, *others: Any) -> Any:
        return _applied(getattr(Tensor, name), self, *others)

    return operate


for _name in ("add", "radd", "mul", "rmul", "truediv", "neg", "matmul"):
    setattr(IndexScores, f"__{_name}__", _operator(f"__{_name}__"))


class TopKeys:
    """Stands for the keys that a selection left to each token, until attention gets it.

    Attributes:
        selected: `[tokens, columns]` bool; None: all that a token sees.
    """

    def __init__(self, selected: Tensor | None) -> None:
        self.selected = selected

    @property
    def indices(self) -> TopKeys:
        return self

    def to(self, dtype: torch.dtype) -> TopKeys:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse("selected keys", f"reads .{name} of them")

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> NoReturn:
        _refuse("selected keys", f"passes them to {getattr(func, '__name__', func)}")


def selection_of(arguments: Any) -> TopKeys | None:
    """The selection among what a layer passes to attention beside its queries, keys and values."""
    return next((each for each in arguments if isinstance(each, TopKeys)), None)


def _refuse(of: str, what: str) -> NoReturn:
    raise UnsupportedModelError(f"it computes with its {of} in code of its own ({what})")
