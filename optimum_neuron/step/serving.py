# SPDX-License-Identifier: Apache-2.0
"""The backends that serve a model's code during one forward pass, and stand-ins for tensors and numbers that the code is handed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, ClassVar, NoReturn, TypeVar

from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import UnsupportedModelError
from .layer_state import LayerState


@dataclass(frozen=True)
class Backends:
    """The backends of one forward pass by kind of layer state.

    `make_bias` turns a mask and a dtype into what a model that attends by code of its own adds to its scores; None for others.
    `positions` are those of the step's tokens.
    """

    by_kind: Mapping[type[LayerState], Any]
    make_bias: Callable[[Any, Any], Any] | None = None
    positions: Tensor | None = None

    def __getitem__(self, kind: type[LayerState]) -> Any:
        return self.by_kind[kind]


_T = TypeVar("_T")
_backends: ContextVar[Backends | None] = ContextVar("backends of the running forward pass", default=None)


@contextmanager
def set_within(variable: ContextVar[_T], value: _T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def serving(backends: Backends, position_ids: Tensor | None = None) -> AbstractContextManager[None]:
    """Serve the forward passes within, of tokens at `position_ids [tokens]`."""
    return set_within(_backends, replace(backends, positions=position_ids))


def running_backends() -> Backends | None:
    """Return the backends of the running step; None outside of a step."""
    return _backends.get()


def replace_in_steps(owner: Any, name: str, ours: Callable[..., Any]) -> None:
    """Replace a member of a class or module by one that calls `ours` while a step runs, with the backends, the member and its arguments."""
    theirs = getattr(owner, name)
    if hasattr(theirs, "_without_step"):
        return

    @wraps(theirs)
    def call_member(*args: Any, **kwargs: Any) -> Any:
        backends = running_backends()
        return theirs(*args, **kwargs) if backends is None else ours(backends, theirs, *args, **kwargs)

    call_member._without_step = theirs  # type: ignore[attr-defined]
    setattr(owner, name, call_member)


def name_of(func: Callable) -> str:
    """Return the name of one of torch's functions, without underscores around it."""
    return getattr(func, "__name__", str(func)).strip("_")


class StandIn:
    """A stand-in for a tensor: model code can hand it on. Each use is read as what it means, or refused by name.

    Messages have `refusal`, of a use, and `call`, of a function's name and the `pronoun`.
    """

    pronoun: ClassVar[str] = "them"
    refusal: ClassVar[str] = "it {}"
    call: ClassVar[str] = "passes {1} to {0}"

    @classmethod
    def refuse_use(cls, use: str) -> NoReturn:
        """Raise UnsupportedModelError for a use that has no meaning in a step."""
        raise UnsupportedModelError(cls.refusal.format(use))

    def call_torch(self, func: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of torch's function, or refuse it."""
        self.refuse_use(self.call.format(name_of(func), self.pronoun))

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = next(each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, cls))
        return own.call_torch(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.refuse_use(f"reads .{name} of {self.pronoun}")


class IndexUsedError(Exception):
    """A layer's code looked at the number of its layer."""


class WatchedIndex:
    """A stand-in for an int in an attribute of a module: code can pass it on. Any other use raises, and sets `used`."""

    def __init__(self, number: int) -> None:
        self._number = number
        self.used = False

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return int  # for isinstance

    def _refuse_use(self, *_: Any) -> NoReturn:
        self.used = True
        raise IndexUsedError

    __getattr__ = _refuse_use


# Python looks operators up in the class alone. Of those that every object has, these show the number.
_REVEALING = {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__str__"}
for _name in _REVEALING | {name for name in dir(int) if name.startswith("__") and name not in dir(object)}:
    setattr(WatchedIndex, _name, WatchedIndex._refuse_use)


def plain_index(index: Any) -> int:
    number: int = index._number if type(index) is WatchedIndex else index
    return number


# Between the numbers of the caches of a layer that attends several times; more than any model's layers.
CALLS_APART = 100_000


@dataclass
class LayerCalls:
    """The numbers of caches in one forward pass: a layer that attends several times has one for each call, the first its own number."""

    counts: dict[int, int] = field(default_factory=dict)

    def number_call(self, layer_idx: int) -> int:
        before = self.counts.get(layer_idx, 0)
        self.counts[layer_idx] = before + 1
        return layer_idx + before * CALLS_APART
