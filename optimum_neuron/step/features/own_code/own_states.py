# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for states that a layer's own code takes on.

Such a layer runs with each token of a step as a text of its own (layers_by_token.py), so it writes the recurrence of one token down once:

    state = decay * state + key @ value;   output = query @ state      a state_space_scan, of matrices
    state = decay * state + added;         output = state              a selective_scan, of vectors
    inputs = cat(state, input);            state = inputs[..., 1:]     the last inputs, for a convolution of the layer's own
    output = state;                        state = input               the same, of one input
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ....errors import UnsupportedModelError
from ...serving import StandIn, name_of
from ..convolution.convolution import ConvolutionBackend
from ..recurrence.recurrence import RecurrenceBackend, ScanCall, ScanKind


class StateStandIn(StandIn):
    """A stand-in for a state that a layer's own code takes on."""

    pronoun = "it"
    refusal = "it keeps a state in code of its own, which {}: that is no recurrence of a step"
    call = "calls {0} on {1}"


@dataclass(eq=False)
class Outer(StateStandIn):
    """The products of `key [tokens, heads, key_dim]` and `value [tokens, heads, value_dim]`: what a token adds to matrices."""

    key: Tensor
    value: Tensor


class Run(TorchFunctionMode):
    """One layer's run over the tokens of a step. It notes exponentials, and products of a column and a row."""

    def __init__(self, tokens: int, recurrences: RecurrenceBackend, convolutions: ConvolutionBackend) -> None:
        super().__init__()
        self.tokens, self.recurrences, self._convolutions = tokens, recurrences, convolutions
        self._exponentials: list[tuple[Tensor, Tensor]] = []
        self.expected: list[LaterInput] = []  # get the layer's last input when the layer hands it over
        self._windows, self._rests = 0, False

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = "" if self._rests else name_of(func)
        if name == "matmul" and len(args) == 2 and all(isinstance(each, Tensor) and each.dim() == 4 for each in args):
            column, row = args
            alike = column.shape[:2] == row.shape[:2] and len(row) == self.tokens
            if alike and column.shape[3] == row.shape[2] == 1:
                return Outer(column[..., 0], row[..., 0, :])
        result = func(*args, **kwargs or {})
        if name == "exp" and args and result is not args[0]:
            self._exponentials.append((result, args[0]))
        return result

    @contextmanager
    def _rest_notes(self) -> Iterator[None]:
        self._rests = True  # what a step computes is no code of the layer's, and is not noted
        yield
        self._rests = False

    def take_logarithm(self, decay: Tensor) -> Tensor:
        """Return the logarithm in float32; of an exponential its exponent, without the rounding of either."""
        for result, exponent in self._exponentials:
            if result is decay:
                return exponent.float()
        return decay.float().clamp(min=torch.finfo(torch.float32).tiny).log()

    def scan(self, kind: ScanKind, call: ScanCall) -> Tensor:
        with self._rest_notes():
            return self.recurrences.scan(kind, call)

    def read_before(self, inputs: Tensor, past: int) -> Tensor:
        layer_idx, index = self.recurrences.layer_idx, self._windows
        self._windows += 1
        if layer_idx is None:
            raise UnsupportedModelError("it keeps inputs in a layer that has no number")
        with self._rest_notes():
            return self._convolutions.read_before(layer_idx, index, inputs.transpose(0, 1)[None], past)

    def keeps_inputs(self, inputs: object) -> bool:
        """Return whether inputs `[tokens, channels]` that a layer hands over are those that it was expected to."""
        if not isinstance(inputs, Tensor) or inputs.dim() != 2 or len(self.expected) != 1:
            return False
        self.expected.pop().take_inputs(inputs)
        return True


RUNS: ContextVar[Run | None] = ContextVar("run of the layer with a state that is read", default=None)


running_layer = RUNS.get  # the run of the layer that runs now; None where no such layer runs


def state_of_run() -> OwnState:
    """Return the state that the running layer gets from a cache; raise UnsupportedModelError where no such layer runs."""
    run = running_layer()
    if run is None:
        raise UnsupportedModelError("it asks its cache for a state in a layer that is not known to keep one")
    return OwnState(run)


def is_kept(state: object) -> bool:
    """Return whether what a layer hands over, or leaves in an attribute, is a state that the step has kept already."""
    return isinstance(state, LastInputs) or (isinstance(state, OwnState) and state.is_read)


class StatesOfLayers:
    """The states in a cache, by layer and by the number of a state: for any layer, those of the one that runs."""

    def __getitem__(self, layer_idx: int) -> StatesOfLayers:
        return self

    @property
    def conv_states(self) -> dict[int, OwnState]:
        return defaultdict(state_of_run)

    recurrent_states = conv_states


@dataclass(eq=False)
class OwnState(StateStandIn):
    """The state of each token's text before it; times a decay, by its logarithm; then with what the token adds.

    `given` is its shape where the layer gives one. `is_read` once the recurrence was computed, which keeps the state, too.
    """

    run: Run
    given: torch.Size | None = None
    exponent: Tensor | None = None
    added: Tensor | Outer | None = None
    is_read: bool = False

    @property
    def shape(self) -> torch.Size:
        return self.given if self.given is not None else self.refuse_use("reads .shape of it")

    def __getitem__(self, index: Any) -> OwnState:
        """Return the same for all of it, and for the last token of a vector's state with what tokens add."""
        each = index if isinstance(index, tuple) else (index,)
        if (
            index != (slice(None), -1)
            if self.added is not None
            else any(one not in (None, slice(None)) for one in each)
        ):
            self.refuse_use(f"takes {index} of it")
        return self

    def to(self, dtype: Any = None, *_: object, **__: object) -> Any:
        """Return itself, as states are float32; with what tokens add the vectors, as the layer uses them."""
        if self.added is None:
            return self
        if isinstance(self.added, Outer):
            self.refuse_use("reads all of its matrices")
        exponent = self._begin_reading()
        added, shape = self.added.float(), self.added.shape
        steps = -exponent.broadcast_to(shape).flatten(1)[:, None]
        key = added.new_ones((self.run.tokens, 1, 1))
        rates = added.new_full((1, steps.shape[2]), -1.0)
        call = ScanCall(torch.ones_like(key), key, added.flatten(1)[:, None], steps, rates=rates)
        return self.run.scan("selective_scan", call).reshape(shape).to(dtype)

    type = to

    def unsqueeze(self, dim: int) -> OwnState:
        return self if self.added is None else self.refuse_use("reads .unsqueeze of it")

    def __mul__(self, decay: object) -> OwnState:
        if not isinstance(decay, Tensor) or self.exponent is not None:
            self.refuse_use(f"multiplies it by {type(decay).__name__}")
        return replace(self, exponent=self.run.take_logarithm(decay))

    __rmul__ = __mul__

    def __add__(self, added: object) -> OwnState:
        if not isinstance(added, Tensor | Outer) or self.exponent is None or self.added is not None:
            self.refuse_use(f"adds {type(added).__name__} to it")
        return replace(self, added=added)

    __radd__ = __iadd__ = __add__

    def call_torch(self, func: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = name_of(func)
        if name in ("mul", "rmul") and self.exponent is None:
            return self * next(each for each in args if each is not self)
        if name in ("add", "radd") and len(args) == 2 and self.exponent is not None and self.added is None:
            return self + next(each for each in args if each is not self)
        if name == "matmul" and args[1] is self and self.added is not None:
            return self._read_matrices(args[0])
        if name == "cat" and len(args[0]) == 2 and args[0][0] is self and self.exponent is None:
            return self._join_inputs(args[0][1], kwargs.get("dim", args[1] if len(args) > 1 else 0))
        return super().call_torch(func, args, kwargs)

    def _join_inputs(self, inputs: Tensor, dim: int) -> Inputs | LaterInput:
        if inputs.dim() == 3 and inputs.shape[2] == 1 and dim in (-1, 2):
            return Inputs(self.run, inputs, None if self.given is None else self.given[-1])
        if inputs.dim() != 3 or inputs.shape[1] != 0 or dim != 1:
            self.refuse_use(f"joins it to {list(inputs.shape)}")
        self.run.expected.append(LaterInput(self.run))
        return self.run.expected[-1]

    def _read_matrices(self, query: Tensor) -> Tensor:
        """Multiply matrices by `query [tokens, heads, 1, key_dim]`: `[tokens, heads, 1, value_dim]`."""
        added = self.added
        if not isinstance(added, Outer) or query.shape != (*added.key.shape[:2], 1, added.key.shape[2]):
            self.refuse_use(f"multiplies it by {list(query.shape)}, which is no query for each head")
        exponent = self._begin_reading()
        exponent = exponent[(None,) * (4 - exponent.dim())]
        if exponent.shape[3] != 1:
            self.refuse_use("has a decay of its own for each of its columns")
        decay = exponent.expand(*added.key.shape[:2], exponent.shape[2], 1)[..., 0]
        decay = decay[..., 0] if decay.shape[2] == 1 else decay
        call = ScanCall(query[:, :, 0].float(), added.key.float(), added.value.float(), decay)
        return self.run.scan("state_space_scan", call)[:, :, None].to(added.value.dtype)

    def _begin_reading(self) -> Tensor:
        if self.is_read or self.exponent is None:
            self.refuse_use("reads it twice")
        self.is_read = True
        return self.exponent


class _EarlierInputs(StateStandIn):
    """Inputs of earlier tokens: a tensor, by `as_tensor`, to all but the code that keeps them."""

    def call_torch(self, func: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = partial(pytree.tree_map_only, _EarlierInputs, lambda each: each.as_tensor())
        return func(*inputs(args), **inputs(kwargs))


@dataclass(eq=False)
class Inputs(_EarlierInputs):
    """The last inputs of each token's text and its `own [tokens, channels, 1]`; `past` is None until the layer says how many it keeps."""

    run: Run
    own: Tensor
    past: int | None
    tensor: Tensor | None = None

    def __getitem__(self, index: Any) -> Any:
        last = index[-1] if isinstance(index, tuple) else None
        if isinstance(last, slice) and all(each in (..., slice(None)) for each in index[:-1]):
            past = -last.start if last.start is not None and last.start < 0 else self.past
            if past is not None and self.past in (None, past) and last in (slice(1, None), slice(-past, None)):
                self.past = past
                return LastInputs(torch.Size((*self.own.shape[:2], past)))
        return self.as_tensor()[index]

    def __mul__(self, other: Tensor) -> Tensor:
        return self.as_tensor() * other

    def as_tensor(self) -> Tensor:
        if self.past is None:
            self.refuse_use("does not say how many inputs it keeps before it uses them")
        if self.tensor is None:
            self.tensor = torch.cat([self.run.read_before(self.own[..., 0], self.past), self.own], -1)
        return self.tensor


@dataclass(eq=False)
class LaterInput(_EarlierInputs):
    """The last input of each token's text, `[tokens, 1, channels]`, of a layer that hands over the next one, `[tokens, channels]`, later."""

    run: Run
    tensor: Tensor | None = None

    def take_inputs(self, inputs: Tensor) -> None:
        self.tensor = self.run.read_before(inputs, 1).transpose(1, 2)

    def as_tensor(self) -> Tensor:
        if self.tensor is None:
            self.refuse_use("uses its last input before it keeps the next one")
        return self.tensor


@dataclass(eq=False)
class LastInputs(StateStandIn):
    """The inputs that a layer keeps: all but the first, `[tokens, channels, past]`."""

    shape: torch.Size

    def call_torch(self, func: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name_of(func) == "pad" and args[0] is self and not any(args[1]):
            return self
        return super().call_torch(func, args, kwargs)
