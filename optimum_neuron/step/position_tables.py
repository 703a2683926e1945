# SPDX-License-Identifier: Apache-2.0
"""Tables of positions that number the tokens of a call themselves, behind those in the cache: in a step they look up its tokens' own.

Models with such a table take no positions, and pass none on to it. It has a parameter for them all the same.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn


_positions: ContextVar[Tensor | None] = ContextVar("positions of the running step's tokens", default=None)


@contextmanager
def numbering(position_ids: Tensor) -> Iterator[None]:
    """For the forward passes within: the positions `[tokens]` of their tokens."""
    token = _positions.set(position_ids)
    try:
        yield
    finally:
        _positions.reset(token)


def set_position_tables(model: nn.Module) -> None:
    """Has a model's tables look up the positions of steps, where a step runs and nobody passes them others."""
    for kind in {type(module) for module in model.modules() if isinstance(module, nn.Embedding)}:
        parameters = inspect.signature(kind.forward).parameters
        if {"past_key_values_length", "position_ids"} <= parameters.keys() and not hasattr(
            kind.forward, "_without_step"
        ):
            made: Any = kind
            made.forward = _in_steps(kind.forward)


def _in_steps(theirs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    signature = inspect.signature(theirs)

    @functools.wraps(theirs)
    def forward(*args: Any, **kwargs: Any) -> Tensor:
        given = signature.bind(*args, **kwargs)
        if given.arguments.get("position_ids") is None:
            given.arguments["position_ids"] = _positions.get()
        return theirs(*given.args, **given.kwargs)

    forward._without_step = theirs  # type: ignore[attr-defined]
    return forward
