# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for states that a layer's own code takes on.

Such a layer runs with each token of a step as a text of its own (layers_by_token.py), and gets a stand-in for the states of these texts.
Its code writes the recurrence of one token down once, and its own operators become what they mean, for any number of tokens:

    state = decay * state + key @ value;   output = query @ state      a state_space_scan, of matrices
    state = decay * state + added;         output = state              a selective_scan, of vectors
    inputs = cat(state, input);            state = inputs[..., 1:]     the last inputs, for a convolution of the layer's own
    output = state;                        state = input               the same, of one input

Other operators fail by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ....errors import UnsupportedModelError
from ...serving import name_of
from ..recurrence.recurrence import ScanCall
from .own_run import Outer, Run, StateStandIn, running_layer


def state_of_run() -> OwnState:
    """Return the state that the running layer gets from a cache; raise UnsupportedModelError where no such layer runs."""
    run = running_layer()
    if run is None:
        raise UnsupportedModelError("it asks its cache for a state in a layer that is not known to keep one")
    return OwnState(run)


def is_kept(state: object) -> bool:
    """Return whether what a layer hands over, or leaves in an attribute, is a state that the step has kept already."""
    return isinstance(state, LastInputs) or (isinstance(state, TakenOn) and state.is_read)


class StatesOfLayers:
    """The states in a cache, by layer and by the number of a state: for any layer, those of the one that runs."""

    def __getitem__(self, layer_idx: int) -> StatesOfLayers:
        return self

    @property
    def conv_states(self) -> _StatesOfLayer:
        return _StatesOfLayer()

    recurrent_states = conv_states


class _StatesOfLayer:
    def __getitem__(self, state_idx: int) -> OwnState:
        return state_of_run()


class OwnState(StateStandIn):
    """The state of each token's text before it, of a shape where the layer gives one: `[tokens, size]`, or `[tokens, channels, past]`."""

    def __init__(self, run: Run, shape: torch.Size | None = None) -> None:
        self._run = run
        if shape is not None:
            self.shape = shape

    def __getitem__(self, index: Any) -> OwnState:
        if any(each is not None and each != slice(None) for each in (index if isinstance(index, tuple) else (index,))):
            self.refuse_use(f"takes {index} of it")
        return self

    def to(self, *_: object, **__: object) -> OwnState:
        """Return itself: states are float32."""
        return self

    unsqueeze = to

    def __mul__(self, decay: object) -> _Decayed:
        if not isinstance(decay, Tensor):
            self.refuse_use(f"multiplies it by {type(decay).__name__}")
        return _Decayed(self._run, self._run.take_logarithm(decay))

    __rmul__ = __mul__

    def call_torch(self, func: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name_of(func) in ("mul", "rmul"):
            return self * next(each for each in args if each is not self)
        if name_of(func) == "cat" and len(args[0]) == 2 and args[0][0] is self:
            return self._join_inputs(args[0][1], kwargs.get("dim", args[1] if len(args) > 1 else 0))
        return super().call_torch(func, args, kwargs)

    def _join_inputs(self, inputs: Tensor, dim: int) -> Inputs | LaterInput:
        if inputs.dim() == 3 and inputs.shape[2] == 1 and dim in (-1, 2):
            shape = vars(self).get("shape")
            return Inputs(self._run, inputs, None if shape is None else shape[-1])
        if inputs.dim() != 3 or inputs.shape[1] != 0 or dim != 1:
            self.refuse_use(f"joins it to {list(inputs.shape)}")
        later = LaterInput(self._run)
        self._run.expect_inputs(later.take_inputs)
        return later


class _Decayed(StateStandIn):
    """A state times a decay, given by its logarithm."""

    def __init__(self, run: Run, exponent: Tensor) -> None:
        self._run = run
        self._exponent = exponent

    def __add__(self, added: object) -> TakenOn:
        if not isinstance(added, Tensor | Outer):
            self.refuse_use(f"adds {type(added).__name__} to it")
        return TakenOn(self._run, self._exponent, added)

    __radd__ = __iadd__ = __add__

    def call_torch(self, func: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name_of(func) in ("add", "radd") and len(args) == 2:
            return self + next(each for each in args if each is not self)
        return super().call_torch(func, args, kwargs)


class TakenOn(StateStandIn):
    """A state with what a token adds. `is_read` once the recurrence was computed, which keeps the state, too."""

    def __init__(self, run: Run, exponent: Tensor, added: Tensor | Outer) -> None:
        self._run = run
        self._exponent = exponent
        self._added = added
        self.is_read = False

    def __getitem__(self, index: Any) -> TakenOn:
        """Return the state of the last token of a vector's one."""
        if index != (slice(None), -1):
            self.refuse_use(f"takes {index} of it")
        return self

    def to(self, dtype: torch.dtype) -> Tensor:
        """Return vectors, as the layer uses them."""
        if isinstance(self._added, Outer):
            self.refuse_use("reads all of its matrices")
        self._begin_reading()
        added, shape = self._added.float(), self._added.shape
        steps = -self._exponent.broadcast_to(shape).flatten(1)[:, None]
        key = added.new_ones((self._run.tokens, 1, 1))
        rates = added.new_full((1, steps.shape[2]), -1.0)
        call = ScanCall(torch.ones_like(key), key, added.flatten(1)[:, None], steps, rates=rates)
        return self._run.scan("selective_scan", call).reshape(shape).to(dtype)

    type = to

    def call_torch(self, func: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name_of(func) == "matmul" and args[1] is self:
            return self._read_matrices(args[0])
        return super().call_torch(func, args, kwargs)

    def _read_matrices(self, query: Tensor) -> Tensor:
        """Multiply matrices by `query [tokens, heads, 1, key_dim]`: `[tokens, heads, 1, value_dim]`."""
        added = self._added
        if not isinstance(added, Outer) or query.shape != (*added.key.shape[:2], 1, added.key.shape[2]):
            self.refuse_use(f"multiplies it by {list(query.shape)}, which is no query for each head")
        exponent = self._exponent[(None,) * (4 - self._exponent.dim())]
        if exponent.shape[3] != 1:
            self.refuse_use("has a decay of its own for each of its columns")
        self._begin_reading()
        decay = exponent.expand(*added.key.shape[:2], exponent.shape[2], 1)[..., 0]
        decay = decay[..., 0] if decay.shape[2] == 1 else decay
        call = ScanCall(query[:, :, 0].float(), added.key.float(), added.value.float(), decay)
        return self._run.scan("state_space_scan", call)[:, :, None].to(added.value.dtype)

    def _begin_reading(self) -> None:
        if self.is_read:
            self.refuse_use("reads it twice")
        self.is_read = True


class _EarlierInputs(StateStandIn):
    """Inputs of earlier tokens: a tensor to all but the code that keeps them."""

    def as_tensor(self) -> Tensor:
        raise NotImplementedError

    def call_torch(self, func: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*_as_tensors(args), **_as_tensors(kwargs))


def _as_tensors(values: Any) -> Any:
    return pytree.tree_map(lambda each: each.as_tensor() if isinstance(each, _EarlierInputs) else each, values)


class Inputs(_EarlierInputs):
    """The last inputs of each token's text and its `own [tokens, channels, 1]`; `past` is None until the layer says how many it keeps."""

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
        return self.as_tensor()[index]

    def __mul__(self, other: Tensor) -> Tensor:
        return self.as_tensor() * other

    def as_tensor(self) -> Tensor:
        if self._past is None:
            self.refuse_use("does not say how many inputs it keeps before it uses them")
        if self._tensor is None:
            self._tensor = torch.cat([self._run.read_before(self._own[..., 0], self._past), self._own], -1)
        return self._tensor


class LaterInput(_EarlierInputs):
    """The last input of each token's text, `[tokens, 1, channels]`, of a layer that hands over the next one later."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._tensor: Tensor | None = None

    def take_inputs(self, inputs: Tensor) -> None:
        """Take the tokens' own inputs `[tokens, channels]`."""
        self._tensor = self._run.read_before(inputs, 1).transpose(1, 2)

    def as_tensor(self) -> Tensor:
        if self._tensor is None:
            self.refuse_use("uses its last input before it keeps the next one")
        return self._tensor


class LastInputs(StateStandIn):
    """The inputs that a layer keeps: all but the first, `[tokens, channels, past]`."""

    def __init__(self, shape: torch.Size) -> None:
        self.shape = shape

    def call_torch(self, func: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name_of(func) == "pad" and args[0] is self and not any(args[1]):
            return self
        return super().call_torch(func, args, kwargs)
