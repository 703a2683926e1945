# SPDX-License-Identifier: Apache-2.0
"""Sparse selection as transformers' layers write it: index keys in the cache, scores over them, and the largest of these.

A layer's indexer hands its keys to the cache, multiplies its queries by all that it gets back, hides what a token does not see and takes
the top-k, of keys or of blocks of them. Here the cache returns `IndexKeys`: a product with them gives each token the scores over its own
slot's keys. Until the top-k all is the model's own code, on tensors. The result is `TopKeys`, which only the attention interface can read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from ....errors import UnsupportedModelError
from ...attention.masks import CausalMask
from ...layer_state import StateRecorder
from ...serving import StandIn


class TopKeys(StandIn):
    """A stand-in for selected keys, `[tokens, heads, columns]` bool, with one head where all select alike; None: all that are seen."""

    refusal = "it computes with its selected keys in code of its own ({})"

    def __init__(self, selected: Tensor | None) -> None:
        self.selected = selected

    @property
    def indices(self) -> TopKeys:
        return self

    def __iter__(self) -> Iterator[Any]:
        """Return values and indices, as torch's top-k."""
        return iter((_TopScores(), self))

    def to(self, dtype: torch.dtype) -> TopKeys:
        return self

    def narrow_mask(self, mask: CausalMask) -> CausalMask:
        return CausalMask(mask.window, mask.extra, self)

    def masked_fill(self, mask: object, value: int) -> TopKeys:
        """Mark, by -1, those that code has hidden by minus infinity: none of them was selected."""
        if not isinstance(mask, _TopScores) or value != -1:
            self.refuse_use(f"fills them with {value}")
        return self


class _TopScores(StandIn):
    """A stand-in for the scores of selected keys, by which code may only find those that it has hidden; and for these."""

    pronoun, refusal = "their scores", TopKeys.refusal
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> Any:
        if other != -math.inf:
            self.refuse_use(f"compares their scores with {other}")
        return self


def selection_of(mask: object, arguments: Any) -> TopKeys | None:
    """Return the selection in a layer's mask, or among its other arguments to attention."""
    selection = mask.selection if isinstance(mask, CausalMask) else None
    return next((each for each in (selection, *arguments) if isinstance(each, TopKeys)), None)


def _refuse_scores(what: str) -> NoReturn:
    raise UnsupportedModelError(f"it computes with its index scores in code of its own ({what})")


# Columns that a layer's selection is asked about: more than a token of any model attends to.
ASKED_COLUMNS = 1 << 16
# From the means `[..., pools, dim]` of keys that stand side by side to the keys of these pools.
Pool = Callable[[Tensor], Tensor]


class KeySource:
    """The index keys of each token's own slot, with room for `columns`; here none is ever left out."""

    columns = 1

    def multiply_query(self, query: Tensor) -> Tensor:
        """Return products `[tokens, n, columns]` of `query [tokens, n, dim]` with the keys, in the query's type."""
        return query.new_zeros((*query.shape[:2], self.columns))

    def select_top(self, scores: Tensor, of: ScoresOf, count: int) -> Any:
        """Return the `count` columns of the largest of `scores [tokens, heads, columns / of.width]` that each token sees."""
        return TopKeys(None)

    def pool_keys(self, width: int, finish: Pool) -> KeySource:
        """Return keys for `width` columns each, of which a token sees the complete ones; selections have the columns that no complete pool has."""
        return self


@dataclass(frozen=True)
class ScoresOf:
    """The history of scores.

    Attributes:
        mask: what was added to them.
        hidden: the model's code has put minus infinity where a token sees nothing, and selects none of these.
        width: neighboring columns that a score stands for; of the last one there may be fewer.
        by_head: whether they are `[1, heads, tokens, ..., columns]`, not `[1, tokens, ..., columns]`.
    """

    mask: CausalMask | None = None
    hidden: bool = False
    width: int = 1
    by_head: bool = False


class IndexBackend(Protocol):
    def keep_index(self, layer_idx: int, keys: Tensor) -> KeySource:
        """Take `keys [tokens, dim]` of the step's tokens."""


class AskedKeys(KeySource):
    """Keys that record how many columns a selection takes, and how many of them at a time."""

    columns = ASKED_COLUMNS

    def __init__(self, note: Callable[[int, int], None]) -> None:
        self._note = note

    def pool_keys(self, width: int, finish: Pool) -> AskedKeys:
        return AskedKeys(lambda pools, _: self._note(pools * width + width - 1, width))

    def select_top(self, scores: Tensor, of: ScoresOf, count: int) -> TopKeys:
        self._note(count * of.width, of.width)
        return TopKeys(None)


# Products of `[1, tokens, n, dim]` with keys, and of `[1, n, tokens, dim]`.
_BY_TOKEN, _BY_HEAD = ("batch", "one", "dim", "columns"), ("batch", "head", "dim", "columns")


@dataclass(frozen=True)
class IndexKeys(StandIn):
    """A stand-in for the index keys `[1, columns, dim]`, or `[1, 1, columns, dim]`, of each token's slot, with the step's tokens in it."""

    refusal = "it computes with its index keys in code of its own ({})"
    source: Any  # a KeySource
    dim: int
    dtype: torch.dtype
    axes: tuple[str, ...] = ("batch", "columns", "dim")

    @classmethod
    def keep(cls, backend: IndexBackend, layer_idx: int, keys: Tensor) -> IndexKeys:
        """Return those of `keys [1, tokens, dim]`, or of one head `[1, 1, tokens, dim]`, and of all tokens before them."""
        if keys.dim() == 4 and keys.shape[1] == 1:
            source = backend.keep_index(layer_idx, keys[0, 0])
            return cls(source, keys.shape[-1], keys.dtype, ("batch", "head", "columns", "dim"))
        if keys.dim() != 3:
            raise UnsupportedModelError(f"layer {layer_idx} keeps index keys of shape {list(keys.shape)}")
        return cls(backend.keep_index(layer_idx, keys[0]), keys.shape[-1], keys.dtype)

    @property
    def shape(self) -> torch.Size:
        sizes = {"batch": 1, "one": 1, "head": 1, "columns": self.source.columns, "dim": self.dim}
        return torch.Size([sizes[axis] for axis in self.axes])

    def transpose(self, one: int, other: int) -> IndexKeys:
        axes = list(self.axes)
        axes[one], axes[other] = axes[other], axes[one]
        return replace(self, axes=tuple(axes))

    def pool_keys(self, width: int, finish: Pool) -> IndexKeys:
        return replace(self, source=self.source.pool_keys(width, finish))

    def unsqueeze(self, place: int) -> IndexKeys:
        axes = list(self.axes)
        axes.insert(place if place >= 0 else len(axes) + 1 + place, "one")
        return replace(self, axes=tuple(axes))

    def to(self, dtype: torch.dtype) -> IndexKeys:
        return replace(self, dtype=dtype)

    def float(self) -> IndexKeys:
        return self.to(torch.float32)

    def call_torch(self, func: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func not in (torch.matmul, Tensor.matmul, Tensor.__matmul__) or kwargs or not isinstance(args[0], Tensor):
            return super().call_torch(func, args, kwargs)
        query, keys = args
        if keys.axes not in (_BY_TOKEN, _BY_HEAD) or query.dim() != 4 or query.dtype != keys.dtype:
            keys.refuse_use(f"multiplies {query.dtype} {list(query.shape)} by them as {keys.axes} of {keys.dtype}")
        if keys.axes == _BY_TOKEN:
            return IndexScores(keys.source.multiply_query(query[0])[None], keys.source)
        products = keys.source.multiply_query(query[0].transpose(0, 1)).transpose(0, 1)
        return IndexScores(products[None], keys.source, ScoresOf(by_head=True))


class IndexScores:
    """Scores of each token over its own slot's keys: a tensor with its history."""

    def __init__(self, tensor: Tensor, source: KeySource, of: ScoresOf | None = None) -> None:
        self._tensor, self._source, self._of = tensor, source, of or ScoresOf()
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device

    def topk(self, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        return torch.topk(self, k, dim, largest)  # type: ignore[arg-type]  # a mode may change how many

    def _select_top(self, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        if dim not in (-1, self._tensor.dim() - 1) or not largest:
            _refuse_scores(f"selects the {'largest' if largest else 'smallest'} of dimension {dim}")
        if self._tensor.dim() != 3 + self._of.by_head or self.shape[-1] != -(-self._source.columns // self._of.width):
            _refuse_scores(f"selects of {list(self.shape)} of them")
        if self._of.mask is None and not self._of.hidden:
            raise UnsupportedModelError("it selects keys without a causal mask")
        scores = self._tensor[0].float()
        return self._source.select_top(scores.transpose(0, 1) if self._of.by_head else scores[:, None], self._of, k)

    def scatter_(self, dim: int, index: Tensor, value: float) -> IndexScores:
        """Scatter one number as torch does, by comparing: no device writes to equal places at once."""
        if dim not in (-1, self._tensor.dim() - 1) or not isinstance(value, int | float):
            _refuse_scores(f"scatters {type(value).__name__} over dimension {dim} of them")
        column = torch.arange(self._tensor.shape[-1], dtype=torch.int32)
        found = (index[..., None].to(torch.int32) == column).any(-2)
        self._tensor = torch.where(found, float(value), self._tensor)
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not callable(getattr(Tensor, name, None)):
            raise AttributeError(name)
        return partial(_apply_function, getattr(Tensor, name), self)

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        call = IndexScores._select_top if func is torch.topk else partial(_apply_function, func)
        return call(*args, **kwargs or {})


def _apply_function(func: Callable, *args: Any, **kwargs: Any) -> Any:
    """Apply a function of scores to tensors. A mask may be added to them, and is kept next to them."""
    scores = next(each for each in args if isinstance(each, IndexScores))
    masks = [each for each in args if isinstance(each, CausalMask)]
    name = getattr(func, "__name__", str(func))
    if masks:
        if name not in ("add", "__add__", "__radd__") or scores._of.mask is not None:
            _refuse_scores(f"passes them and its attention mask to {name}")
        return IndexScores(scores._tensor, scores._source, replace(scores._of, mask=masks[0]))
    plain = (each._tensor if isinstance(each, IndexScores) else each for each in args)
    output = func(*plain, **kwargs)
    if not isinstance(output, Tensor):
        _refuse_scores(f"passes them to {name}")
    of = scores._of
    if name == "masked_fill" and (*args[2:], kwargs.get("value"))[0] == -math.inf:
        of = replace(of, hidden=True)
    elif name == "amax" and kwargs.get("dim", *args[1:2]) in (-1, scores._tensor.dim() - 1):
        of = replace(of, width=of.width * scores.shape[-1])
    return IndexScores(output, scores._source, of)


for _name in ("add", "radd", "mul", "rmul", "truediv", "neg", "matmul"):
    _operator = partial(_apply_function, getattr(Tensor, f"__{_name}__"))
    setattr(IndexScores, f"__{_name}__", lambda *operands, apply=_operator: apply(*operands))


class IndexRecorder(StateRecorder):
    def keep_index(self, layer_idx: int, keys: Tensor) -> KeySource:
        return AskedKeys(partial(self.add_state, "several sets of index keys", layer_idx, keys.shape[1]))
