# SPDX-License-Identifier: Apache-2.0
"""Inputs of earlier tokens, of layers that keep some in code of their own: the last few, or the last one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .own_run import Run, StandIn, name_of, refuse


class _Inputs(StandIn):
    """Inputs of earlier tokens: a tensor to all but who keeps them."""

    def tensor(self) -> Tensor:
        raise NotImplementedError

    def call(self, func: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*_as_tensors(args), **_as_tensors(kwargs))


def _as_tensors(values: Any) -> Any:
    return pytree.tree_map(lambda each: each.tensor() if isinstance(each, _Inputs) else each, values)


class Inputs(_Inputs):
    """The last inputs of each token's text and its own, `[tokens, channels, past + 1]`.

    Args:
        own: `[tokens, channels, 1]`.
        past: None until the layer says how many it keeps.
    """

    def __init__(self, run: Run, own: Tensor, past: int | None) -> None:
        self._run = run
        self._own = own
        self._past = past
        self._tensor: Tensor | None = None

    def __getitem__(self, index: Any) -> Any:
        last = index[-1] if isinstance(index, tuple) else None
        if isinstance(last, slice) and all(each in (..., slice(None)) for each in index[:-1]):
            past = -last.start if last.start is not None and last.start < 0 else self._past
            if past is not None and self._past in (None, past) and last in (slice(1, None), slice(-past, None)):
                self._past = past
                return LastInputs(torch.Size((*self._own.shape[:2], past)))
        return self.tensor()[index]

    def __mul__(self, other: Tensor) -> Tensor:
        return self.tensor() * other

    def tensor(self) -> Tensor:
        if self._past is None:
            refuse("does not say how many inputs it keeps before it uses them")
        if self._tensor is None:
            self._tensor = torch.cat([self._run.before(self._own[..., 0], self._past), self._own], -1)
        return self._tensor


class LaterInput(_Inputs):
    """The last input of each token's text, `[tokens, 1, channels]`, of a layer that tells later what it is."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._tensor: Tensor | None = None

    def take(self, inputs: Tensor) -> None:
        """The tokens' own inputs `[tokens, channels]`."""
        self._tensor = self._run.before(inputs, 1).transpose(1, 2)

    def tensor(self) -> Tensor:
        if self._tensor is None:
            refuse("uses its last input before it keeps the next one")
        return self._tensor


class LastInputs(StandIn):
    """What a layer keeps of `Inputs`: all but the first, `[tokens, channels, past]`."""

    def __init__(self, shape: torch.Size) -> None:
        self.shape = shape

    def call(self, func: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name_of(func) == "pad" and args[0] is self and not any(args[1]):
            return self
        return super().call(func, args, kwargs)
