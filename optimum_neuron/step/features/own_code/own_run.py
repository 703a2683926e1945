# SPDX-License-Identifier: Apache-2.0
"""The run of one layer that takes a state on by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ....errors import UnsupportedModelError
from ...serving import StandIn, name_of, set_within
from ..convolution.convolution import ConvolutionBackend
from ..recurrence.recurrence import RecurrenceBackend, ScanCall, ScanKind


class StateStandIn(StandIn):
    """A stand-in for a state that a layer's own code takes on."""

    pronoun = "it"
    refusal = "it keeps a state in code of its own, which {}: that is no recurrence of a step"
    call = "calls {0} on {1}"


class Outer(StateStandIn):
    """The products of `key [tokens, heads, key_dim]` and `value [tokens, heads, value_dim]`: what a token adds to matrices."""

    def __init__(self, key: Tensor, value: Tensor) -> None:
        self.key = key
        self.value = value


class Run(TorchFunctionMode):
    """One layer's run over the tokens of a step. It notes exponentials, and products of a column and a row."""

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
        if (
            name == "matmul"
            and len(args) > 1
            and all(isinstance(each, Tensor) and each.dim() == 4 for each in args[:2])
        ):
            column, row = args[:2]
            alike = column.shape[:2] == row.shape[:2] and len(row) == self.tokens
            if alike and column.shape[3] == row.shape[2] == 1:
                return Outer(column[..., 0], row[..., 0, :])
        result = func(*args, **kwargs or {})
        if name == "exp" and args and result is not args[0]:
            self._exponentials.append((result, args[0]))
        return result

    @contextmanager
    def _rest_notes(self) -> Iterator[None]:
        """Note nothing within: what a step computes is no code of the layer's."""
        self._rests = True
        try:
            yield
        finally:
            self._rests = False

    def enter_layer(self, layer_idx: Any) -> None:
        self._recurrences.enter_layer(layer_idx)

    def take_logarithm(self, decay: Tensor) -> Tensor:
        """Return the logarithm in float32; of an exponential its exponent, without the rounding of either."""
        for result, exponent in self._exponentials:
            if result is decay:
                return exponent.float()
        return decay.float().clamp(min=torch.finfo(torch.float32).tiny).log()

    def scan(self, kind: ScanKind, call: ScanCall) -> Tensor:
        with self._rest_notes():
            return self._recurrences.scan(kind, call)

    def read_before(self, inputs: Tensor, past: int) -> Tensor:
        layer_idx, index = self._recurrences.layer_idx, self._windows
        self._windows += 1
        if layer_idx is None:
            raise UnsupportedModelError("it keeps inputs in a layer that has no number")
        with self._rest_notes():
            return self._convolutions.read_before(layer_idx, index, inputs.transpose(0, 1)[None], past)

    def expect_inputs(self, take: Callable[[Tensor], None]) -> None:
        """Take a function that gets the layer's last input when the layer hands it over, after it was used."""
        self._later.append(take)

    def keeps_inputs(self, inputs: object) -> bool:
        """Return whether inputs `[tokens, channels]` that a layer hands over are those that it was expected to."""
        if not isinstance(inputs, Tensor) or inputs.dim() != 2 or len(self._later) != 1:
            return False
        self._later.pop()(inputs)
        return True


_runs: ContextVar[Run | None] = ContextVar("run of the layer with a state that is read", default=None)


@contextmanager
def reading_layer(run: Run) -> Iterator[None]:
    """Read the code within: a layer that takes a state on by itself."""
    with set_within(_runs, run), run:
        yield


def running_layer() -> Run | None:
    """Return the run of the layer that runs now; None where no such layer runs."""
    return _runs.get()
