# SPDX-License-Identifier: Apache-2.0
"""What layers do with states that they take on in code of their own, read as recurrences.

Such a layer runs with each token of a step as a text of its own (layers_by_token.py), and gets a stand-in for what these texts have
kept. Of one token its code writes the recurrence down once, and step by step its own operators become what they mean, whatever
the number of tokens:

    state = decay * state + key @ value;   output = query @ state      a state_space_scan, of matrices
    state = decay * state + added;         output = state              a selective_scan, of vectors
    inputs = cat(state, input);            state = inputs[..., 1:]     the last inputs, for a convolution of the layer's own
    output = state;                        state = input               the same, of one input

An operator that has no place among these fails by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...masks import UnsupportedModelError
from ..recurrence.recurrence import ScanCall
from .own_inputs import Inputs, LastInputs, LaterInput
from .own_run import Outer, Run, StandIn, name_of, refuse, running


def state_of_run() -> KeptState:
    """What the layer that runs gets as its state from a cache.

    Raises:
        UnsupportedModelError: no such layer runs.
    """
    run = running()
    if run is None:
        raise UnsupportedModelError("it asks its cache for a state in a layer that is not known to keep one")
    return KeptState(run)


def is_kept(state: object) -> bool:
    """Whether what a layer hands over, or leaves in an attribute, is a state that the step has kept already."""
    return isinstance(state, LastInputs) or (isinstance(state, TakenOn) and state.is_read)


class StatesOfLayers:
    """The states in a cache, by layer and by the number of a state: of whatever layer, those of the one that runs."""

    def __getitem__(self, layer_idx: int) -> StatesOfLayers:
        return self

    @property
    def conv_states(self) -> _StatesOfLayer:
        return _StatesOfLayer()

    recurrent_states = conv_states


class _StatesOfLayer:
    def __getitem__(self, state_idx: int) -> KeptState:
        return state_of_run()


class KeptState(StandIn):
    """What each token's text kept before it.

    Args:
        shape: where the layer tells: `[tokens, size]` of a vector, `[tokens, channels, past]` of inputs.
    """

    def __init__(self, run: Run, shape: torch.Size | None = None) -> None:
        self._run = run
        if shape is not None:
            self.shape = shape

    def __getitem__(self, index: Any) -> KeptState:
        if any(each is not None and each != slice(None) for each in (index if isinstance(index, tuple) else (index,))):
            refuse(f"takes {index} of it")
        return self

    def to(self, *_: object, **__: object) -> KeptState:
        """All types are one: states are float32."""
        return self

    unsqueeze = to

    def __mul__(self, decay: object) -> _Decayed:
        if not isinstance(decay, Tensor):
            refuse(f"multiplies it by {type(decay).__name__}")
        return _Decayed(self._run, self._run.logarithm(decay))

    __rmul__ = __mul__

    def call(self, func: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name_of(func) in ("mul", "rmul"):
            return self * next(each for each in args if each is not self)
        if name_of(func) == "cat" and len(args[0]) == 2 and args[0][0] is self:
            return self._before(args[0][1], kwargs.get("dim", args[1] if len(args) > 1 else 0))
        return super().call(func, args, kwargs)

    def _before(self, inputs: Tensor, dim: int) -> Inputs | LaterInput:
        if inputs.dim() == 3 and inputs.shape[2] == 1 and dim in (-1, 2):
            shape = vars(self).get("shape")
            return Inputs(self._run, inputs, None if shape is None else shape[-1])
        if inputs.dim() != 3 or inputs.shape[1] != 0 or dim != 1:
            refuse(f"joins it to {list(inputs.shape)}")
        later = LaterInput(self._run)
        self._run.expect(later.take)
        return later


class _Decayed(StandIn):
    """A state times a decay, of which this is the logarithm."""

    def __init__(self, run: Run, exponent: Tensor) -> None:
        self._run = run
        self._exponent = exponent

    def __add__(self, added: object) -> TakenOn:
        if not isinstance(added, Tensor | Outer):
            refuse(f"adds {type(added).__name__} to it")
        return TakenOn(self._run, self._exponent, added)

    __radd__ = __iadd__ = __add__

    def call(self, func: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name_of(func) in ("add", "radd") and len(args) == 2:
            return self + next(each for each in args if each is not self)
        return super().call(func, args, kwargs)


class TakenOn(StandIn):
    """A state with what a token adds.

    Attributes:
        is_read: whether the recurrence was computed, which keeps the state, too.
    """

    def __init__(self, run: Run, exponent: Tensor, added: Tensor | Outer) -> None:
        self._run = run
        self._exponent = exponent
        self._added = added
        self.is_read = False

    def __getitem__(self, index: Any) -> TakenOn:
        """Of vectors that of the last token, of one."""
        if index != (slice(None), -1):
            refuse(f"takes {index} of it")
        return self

    def to(self, dtype: torch.dtype) -> Tensor:
        """Vectors, as what a layer goes on with."""
        if isinstance(self._added, Outer):
            refuse("reads all of its matrices")
        self._begin()
        added, shape = self._added.float(), self._added.shape
        steps = -self._exponent.broadcast_to(shape).flatten(1)[:, None]
        key = added.new_ones((self._run.tokens, 1, 1))
        rates = added.new_full((1, steps.shape[2]), -1.0)
        call = ScanCall(torch.ones_like(key), key, added.flatten(1)[:, None], steps, rates=rates)
        return self._run.scan("selective_scan", call).reshape(shape).to(dtype)

    type = to

    def call(self, func: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name_of(func) == "matmul" and args[1] is self:
            return self._read(args[0])
        return super().call(func, args, kwargs)

    def _read(self, query: Tensor) -> Tensor:
        """Matrices by `query [tokens, heads, 1, key_dim]`: `[tokens, heads, 1, value_dim]`."""
        added = self._added
        if not isinstance(added, Outer) or query.shape != (*added.key.shape[:2], 1, added.key.shape[2]):
            refuse(f"multiplies it by {list(query.shape)}, which is no query for each head")
        exponent = self._exponent[(None,) * (4 - self._exponent.dim())]
        if exponent.shape[3] != 1:
            refuse("has a decay of its own for each of its columns")
        self._begin()
        decay = exponent.expand(*added.key.shape[:2], exponent.shape[2], 1)[..., 0]
        decay = decay[..., 0] if decay.shape[2] == 1 else decay
        call = ScanCall(query[:, :, 0].float(), added.key.float(), added.value.float(), decay)
        return self._run.scan("state_space_scan", call)[:, :, None].to(added.value.dtype)

    def _begin(self) -> None:
        if self.is_read:
            refuse("reads it twice")
        self.is_read = True
