# SPDX-License-Identifier: Apache-2.0
"""The backends that serve a model's code during one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

from torch import Tensor

from .layer_state import LayerState


@dataclass(frozen=True)
class Backends:
    """The backends of one forward pass.

    Attributes:
        by_kind: the backend for each kind of layer state.
        make_bias: turns a mask and a dtype into what a model that attends by code of its own adds to its scores; None for others.
    """

    by_kind: Mapping[type[LayerState], Any]
    make_bias: Callable[[Any, Any], Any] | None = None

    def __getitem__(self, kind: type[LayerState]) -> Any:
        return self.by_kind[kind]


_T = TypeVar("_T")
_backends: ContextVar[Backends | None] = ContextVar("backends of the running forward pass", default=None)
_positions: ContextVar[Tensor | None] = ContextVar("positions of the running step's tokens", default=None)


@contextmanager
def set_within(variable: ContextVar[_T], value: _T) -> Iterator[None]:
    """Set a context variable for the code within."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def serving(backends: Backends, position_ids: Tensor | None = None) -> Iterator[None]:
    """Serve the forward passes within.

    Args:
        position_ids: `[tokens]`, positions of the tokens.
    """
    with set_within(_backends, backends), set_within(_positions, position_ids):
        yield


def running_backends() -> Backends | None:
    """Return the backends of the running step; None outside of a step."""
    return _backends.get()


def running_positions() -> Tensor | None:
    """Return the positions `[tokens]` of the running step's tokens."""
    return _positions.get()


def replace_in_steps(owner: Any, name: str, ours: Callable[..., Any]) -> None:
    """Replace a member by one that calls `ours` while a step runs, and itself elsewhere. A second call changes nothing.

    Args:
        owner: a class or module.
        ours: takes the backends, the member that it stands for, and that member's arguments.
    """
    theirs = getattr(owner, name)
    if hasattr(theirs, "_without_step"):
        return

    @wraps(theirs)
    def call_member(*args: Any, **kwargs: Any) -> Any:
        backends = running_backends()
        return theirs(*args, **kwargs) if backends is None else ours(backends, theirs, *args, **kwargs)

    call_member._without_step = theirs  # type: ignore[attr-defined]
    setattr(owner, name, call_member)
