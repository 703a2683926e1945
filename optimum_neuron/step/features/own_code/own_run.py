# SPDX-License-Identifier: Apache-2.0
"""A layer that takes its state on in code of its own, while it runs over a step's tokens: what its operators mean is noted here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ...masks import UnsupportedModelError
from ..convolution.convolution import ConvolutionBackend
from ..recurrence.recurrence import RecurrenceBackend, ScanCall, ScanKind


def refuse(what: str) -> NoReturn:
    raise UnsupportedModelError(f"it keeps a state in code of its own, which {what}: that is no recurrence of a step")


def name_of(func: Callable) -> str:
    return getattr(func, "__name__", str(func)).strip("_")


class StandIn:
    """What is not computed as it stands."""

    def call(self, func: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What torch's function gives; raises UnsupportedModelError where that is nothing of a recurrence."""
        return refuse(f"calls {name_of(func)} on it")

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = next(each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, cls))
        return own.call(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        refuse(f"reads .{name} of it")


class Outer(StandIn):
    """Products of `key [tokens, heads, key_dim]` and `value [tokens, heads, value_dim]`: what a token adds to matrices."""

    def __init__(self, key: Tensor, value: Tensor) -> None:
        self.key = key
        self.value = value


class Run(TorchFunctionMode):
    """One layer's run over the tokens of a step. Of torch's functions it notes exponentials, and products of a column and a row."""

    def __init__(self, tokens: int, recurrences: RecurrenceBackend, convolutions: ConvolutionBackend) -> None:
        super().__init__()
        self.tokens = tokens
        self._recurrences = recurrences
        self._convolutions = convolutions
        self._exponentials: list[tuple[Tensor, Tensor]] = []
        self._later: list[Callable[[Tensor], None]] = []
        self._windows = 0
        self._rests = False

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = "" if self._rests else name_of(func)
        if name == "matmul" and self._is_outer(*args):
            return Outer(args[0][..., 0], args[1][..., 0, :])
        result = func(*args, **kwargs or {})
        if name == "exp" and args and result is not args[0]:
            self._exponentials.append((result, args[0]))
        return result

    def _is_outer(self, column: object = None, row: object = None) -> bool:
        if not isinstance(column, Tensor) or not isinstance(row, Tensor) or column.dim() != 4 or row.dim() != 4:
            return False
        return column.shape[:2] == row.shape[:2] and len(row) == self.tokens and column.shape[3] == row.shape[2] == 1

    @contextmanager
    def _resting(self) -> Iterator[None]:
        """What a step computes is no code of the layer's."""
        self._rests = True
        try:
            yield
        finally:
            self._rests = False

    def logarithm(self, decay: Tensor) -> Tensor:
        """Float32; of what was an exponential its exponent, without the rounding of either."""
        for result, exponent in self._exponentials:
            if result is decay:
                return exponent.float()
        return decay.float().clamp(min=torch.finfo(torch.float32).tiny).log()

    def scan(self, kind: ScanKind, call: ScanCall) -> Tensor:
        with self._resting():
            return self._recurrences.scan(kind, call)

    def before(self, inputs: Tensor, past: int) -> Tensor:
        """`[tokens, channels, past]`, what came before each of `inputs [tokens, channels]`."""
        layer_idx, index = self._recurrences.layer_idx, self._windows
        self._windows += 1
        if layer_idx is None:
            raise UnsupportedModelError("it keeps inputs in a layer that has no number")
        with self._resting():
            return self._convolutions.before(layer_idx, index, inputs.transpose(0, 1)[None], past)

    def expect(self, take: Callable[[Tensor], None]) -> None:
        """A layer goes on with its last input before it tells what that is: `take` gets it then."""
        self._later.append(take)

    def keeps(self, inputs: object) -> bool:
        """Whether inputs `[tokens, channels]` that a layer hands over are those which it goes on with."""
        if not isinstance(inputs, Tensor) or inputs.dim() != 2 or len(self._later) != 1:
            return False
        self._later.pop()(inputs)
        return True


_runs: ContextVar[Run | None] = ContextVar("run of the layer whose state is read", default=None)


@contextmanager
def reading(run: Run) -> Iterator[None]:
    """For the code within: a layer that takes a state on by itself."""
    token = _runs.set(run)
    try:
        with run:
            yield
    finally:
        _runs.reset(token)


def running() -> Run | None:
    """None where no such layer runs."""
    return _runs.get()
