# SPDX-License-Identifier: Apache-2.0
"""Short causal convolutions over the tokens of each slot, whose last inputs a slot keeps from step to step.

transformers' layers hand their inputs to the cache, get them back behind those of earlier calls, and convolve the whole.
A step holds tokens of several slots side by side, so ours get a `ConvolutionInput` back, and torch's convolution of one is
computed by `SlotConvolutions`: each token from the inputs of its own slot at the positions before it, wherever these are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...kv_cache import KVCache
from ...masks import UnsupportedModelError
from ...model_spec import ConvolutionState


class ConvolutionBackend(Protocol):
    """Computes the convolutions of a model's forward pass."""

    def convolve(self, layer_idx: int, index: int, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """From `inputs [1, channels, tokens]` and `weight [channels, kernel]` to `[1, channels, tokens]`."""

    def before(self, layer_idx: int, index: int, inputs: Tensor, past: int) -> Tensor:
        """For a layer that convolves by itself: from `inputs [1, channels, tokens]` to `[tokens, channels, past]`, what came before
        each, zeros before position 0."""


# From inputs, weight and bias, as those of a backend.
Convolve = Callable[[Tensor, Tensor, Tensor | None], Tensor]
# A member of StepOps: from inputs `[tokens, channels]`, weight `[channels, kernel]`, bias `[channels]`, the state that it takes on in
# place, `[slots + 1, kernel - 1, channels]`, and whose tokens these are, as SlotConvolutions has it, to `[tokens, channels]` float32.
SlotConvolution = Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor], Tensor]


class ConvolutionInput:
    """Stands for the inputs `[1, channels, tokens]` of a step's tokens, each behind those of its own slot before it."""

    def __init__(self, inputs: Tensor, convolve: Convolve) -> None:
        self._inputs = inputs
        self._convolve = convolve

    @property
    def shape(self) -> torch.Size:
        return self._inputs.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._inputs.dtype

    def to(self, dtype: torch.dtype) -> ConvolutionInput:
        return ConvolutionInput(self._inputs.to(dtype), self._convolve)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedModelError(f"it reads .{name} of what a convolution is to be applied to")

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Tensor:
        if func is not nn.functional.conv1d:
            name = getattr(func, "__name__", func)
            raise UnsupportedModelError(f"it passes what a convolution is to be applied to to {name}")
        return _conv1d(*args, **(kwargs or {}))


def _conv1d(
    input: ConvolutionInput,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> Tensor:
    """As torch's, without the columns behind the last token, which no causal layer looks at."""
    channels, width, kernel = weight.shape
    options = [value if isinstance(value, int) else value[0] for value in (stride, padding, dilation)]
    if options != [1, kernel - 1, 1] or width != 1 or groups != channels:
        raise UnsupportedModelError(
            f"it convolves with stride, padding and dilation {options}, a kernel of {kernel} and {groups} groups of "
            f"{channels} channels: not each channel causally by itself"
        )
    return input._convolve(input._inputs, weight[:, 0], bias)


class SlotConvolutions:
    """Convolution backend of the step graphs.

    A slot keeps its last `past` inputs `[past, channels]`, in the order of their positions. A step takes each slot on from
    where it is: the tokens of a slot stand side by side, in the order of their positions.

    Args:
        rows, columns: `[tokens]`, where each token of the step is written in the KV cache: its slot and its position, or
            the trash row and a column that no other token has.
        convolve: how a target computes them; None: as the reference does.
    """

    def __init__(self, cache: KVCache, rows: Tensor, columns: Tensor, convolve: SlotConvolution | None = None) -> None:
        self._cache = cache
        self._rows = rows
        self._columns = columns
        self._convolve = convolve
        self._sources: dict[int, tuple[list[Tensor], Tensor]] = {}

    def convolve(self, layer_idx: int, index: int, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self._convolve is None:
            output = self._sum(self._take_on(layer_idx, index, inputs), weight, bias)
        else:
            state = self._cache.convolution(layer_idx, index)
            own = inputs[0].transpose(0, 1).to(state.dtype)
            output = self._convolve(own, weight, bias, state, self._rows, self._columns)
        return output.to(inputs.dtype).transpose(0, 1)[None]

    def before(self, layer_idx: int, index: int, inputs: Tensor, past: int) -> Tensor:
        _, *before = self._take_on(layer_idx, index, inputs)
        return torch.stack(before[::-1], -1)

    @staticmethod
    def _sum(inputs: list[Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
        """Term by term: in one order, whatever the number of tokens."""
        own, *before = inputs
        taps = weight.to(torch.promote_types(own.dtype, torch.float32)).unbind(1)
        output = own * taps[-1]
        for earlier, tap in zip(before, reversed(taps[:-1]), strict=True):
            output = output + earlier * tap
        return output if bias is None else output + bias

    def _take_on(self, layer_idx: int, index: int, inputs: Tensor) -> list[Tensor]:
        """Inputs `[tokens, channels]` of each token, of the position before it, and so on; keeps the last ones."""
        state = self._cache.convolution(layer_idx, index)
        slots, past, channels = state.shape
        if past not in self._sources:
            self._sources[past] = self._find_sources(slots, past)
        before, kept = self._sources[past]
        own = inputs[0].transpose(0, 1).to(state.dtype)
        known = torch.cat([state.flatten(0, 1), own, own.new_zeros((1, channels))])
        earlier = [known.index_select(0, source) for source in before]
        state.copy_(known.index_select(0, kept).view(state.shape))
        return [own, *earlier]

    def _find_sources(self, slots: int, past: int) -> tuple[list[Tensor], Tensor]:
        """Rows of `[slots * past + tokens + 1, channels]`, which are the states, the step's own inputs, and zeros.

        Returns:
            For each of the `past` positions before a token, the nearest first, `[tokens]`; and `[slots * past]`, what the
            states become.
        """
        slot = torch.arange(slots, dtype=torch.int32)[:, None]
        mine = self._rows == slot
        count = mine.sum(1, dtype=torch.int32)[:, None]
        first = torch.where(mine, self._columns, torch.iinfo(torch.int32).max).amin(1).index_select(0, self._rows)
        token = torch.arange(len(self._rows), dtype=torch.int32)
        last = torch.where(mine, token, -1).amax(1)[:, None]
        before = [self._find_before(back, first, slots, past) for back in range(1, past + 1)]
        place = torch.arange(past, dtype=torch.int32)
        moved = place + count  # a slot that gets no token keeps all its inputs where they are
        kept = torch.where(moved < past, slot * past + moved, slots * past + last - (past - 1 - place))
        return before, kept.flatten()

    def _find_before(self, back: int, first: Tensor, slots: int, past: int) -> Tensor:
        """Where the inputs are that come `back` positions before each token, given its slot's first position in the step."""
        rows, columns, tokens = self._rows, self._columns, len(self._rows)
        shift = min(back, tokens)
        earlier = nn.functional.pad(rows[: tokens - shift], (shift, 0), value=-1)
        wanted = columns - back
        in_step = (earlier == rows) & (wanted >= first)
        own = torch.arange(slots * past - back, slots * past - back + tokens, dtype=torch.int32)
        in_state = torch.where(wanted >= 0, rows * past + wanted - first + past, slots * past + tokens)
        return torch.where(in_step, own, in_state)


def state_of(layer_idx: int, index: int, inputs: Tensor, weight: Tensor) -> ConvolutionState:
    """What a convolution keeps per slot.

    Raises:
        UnsupportedModelError: it keeps nothing.
    """
    kernel = weight.shape[-1]
    if kernel < 2:
        raise UnsupportedModelError(f"layer {layer_idx} keeps the inputs of a convolution with a kernel of {kernel}")
    return ConvolutionState(layer_idx, index, kernel - 1, inputs.shape[1])
