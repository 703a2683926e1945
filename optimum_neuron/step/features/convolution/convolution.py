# SPDX-License-Identifier: Apache-2.0
"""Short causal convolutions over the tokens of each slot, which keeps its last inputs from step to step.

transformers' layers hand their inputs to the cache, get them back after those of earlier calls, and convolve the whole. Ours get a
`ConvolutionInput` back, and `SlotConvolutions` computes torch's convolution of one: each token from the inputs of its own slot before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ....errors import UnsupportedModelError
from ...attention.kv_cache import KVCache
from ...attention.rows import StepLayout
from ...layer_state import StateRecorder
from ...serving import StandIn


class ConvolutionBackend(Protocol):
    """A backend that computes the convolutions of a forward pass."""

    def convolve(self, layer_idx: int, index: int, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Convolve `inputs [1, channels, tokens]` by `weight [channels, kernel]` to `[1, channels, tokens]`."""

    def read_before(self, layer_idx: int, index: int, inputs: Tensor, past: int) -> Tensor:
        """Return `[tokens, channels, past]`, the inputs before each of `inputs [1, channels, tokens]`; zeros before position 0."""


# From inputs, weight and bias, as those of a backend.
Convolve = Callable[[Tensor, Tensor, Tensor | None], Tensor]
# A member of StepOps: from inputs `[tokens, channels]`, weight `[channels, kernel]`, bias `[channels]`, the state that it takes on in
# place, `[slots + 1, kernel - 1, channels]`, and the places of the tokens (SlotConvolutions), to `[tokens, channels]` float32.
SlotConvolution = Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor], Tensor]


class ConvolutionInput(StandIn):
    """A stand-in for the inputs `[1, channels, tokens]` of a step's tokens, each after those of its own slot."""

    pronoun = "what a convolution is to be applied to"

    def __init__(self, inputs: Tensor, convolve: Convolve) -> None:
        self._inputs, self._convolve = inputs, convolve
        self.shape, self.dtype = inputs.shape, inputs.dtype

    def to(self, dtype: torch.dtype) -> ConvolutionInput:
        return ConvolutionInput(self._inputs.to(dtype), self._convolve)

    def call_torch(self, func: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        convolves = func is nn.functional.conv1d
        return _convolve_inputs(*args, **kwargs) if convolves else super().call_torch(func, args, kwargs)


def _convolve_inputs(
    input: ConvolutionInput,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> Tensor:
    channels, width, kernel = weight.shape
    options = [value if isinstance(value, int) else value[0] for value in (stride, padding, dilation)]
    if options != [1, kernel - 1, 1] or width != 1 or groups != channels:
        raise UnsupportedModelError(
            f"it convolves with stride, padding and dilation {options}, a kernel of {kernel} and {groups} groups of "
            f"{channels} channels: not each channel causally by itself"
        )
    return input._convolve(input._inputs, weight[:, 0], bias)


@dataclass
class SlotConvolutions:
    """The convolution backend of step graphs, by a target's `operator`, or the reference.

    A slot keeps its last `past` inputs `[past, channels]`, in the order of their positions. Its tokens are neighbors in a step, in the same
    order. `rows` and `columns` `[tokens]` are their slots and positions; of padding the trash row and a column that no other token has.
    """

    cache: KVCache
    rows: Tensor
    columns: Tensor
    operator: SlotConvolution | None = None
    _sources: dict[int, tuple[list[Tensor], Tensor]] = field(default_factory=dict)

    @classmethod
    def for_step(cls, step: StepLayout) -> SlotConvolutions:
        return cls(step.cache, *step.slot_places, step.ops.convolve)

    def convolve(self, layer_idx: int, index: int, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.operator is None:  # summed term by term: in one order, whatever the number of tokens
            own, *before = self._take_on(layer_idx, index, inputs)
            taps = weight.to(torch.promote_types(own.dtype, torch.float32)).unbind(1)
            output = own * taps[-1]
            for earlier, tap in zip(before, reversed(taps[:-1]), strict=True):
                output = output + earlier * tap
            output = output if bias is None else output + bias
        else:
            state = self.cache.get_state("conv", layer_idx, index)
            own = inputs[0].transpose(0, 1).to(state.dtype)
            output = self.operator(own, weight, bias, state, self.rows, self.columns)
        return output.to(inputs.dtype).transpose(0, 1)[None]

    def read_before(self, layer_idx: int, index: int, inputs: Tensor, past: int) -> Tensor:
        _, *before = self._take_on(layer_idx, index, inputs)
        return torch.stack(before[::-1], -1)

    def _take_on(self, layer_idx: int, index: int, inputs: Tensor) -> list[Tensor]:
        """Return inputs `[tokens, channels]` of each token, of the position before it, and so on; keep the last ones."""
        state = self.cache.get_state("conv", layer_idx, index)
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
        """Return rows of `[slots * past + tokens + 1, channels]`: the states, the step's own inputs, and zeros.

        Returns:
            For each of the `past` positions before a token, the nearest first, `[tokens]`; and the new states, `[slots * past]`.
        """
        slot = torch.arange(slots, dtype=torch.int32)[:, None]
        mine = self.rows == slot
        count = mine.sum(1, dtype=torch.int32)[:, None]
        first = torch.where(mine, self.columns, torch.iinfo(torch.int32).max).amin(1).index_select(0, self.rows)
        token = torch.arange(len(self.rows), dtype=torch.int32)
        last = torch.where(mine, token, -1).amax(1)[:, None]
        before, rows, columns, tokens = [], self.rows, self.columns, len(self.rows)
        for back in range(1, past + 1):
            shift = min(back, tokens)
            earlier = nn.functional.pad(rows[: tokens - shift], (shift, 0), value=-1)
            wanted = columns - back
            in_step = (earlier == rows) & (wanted >= first)
            own = torch.arange(slots * past - back, slots * past - back + tokens, dtype=torch.int32)
            in_state = torch.where(wanted >= 0, rows * past + wanted - first + past, slots * past + tokens)
            before.append(torch.where(in_step, own, in_state))
        place = torch.arange(past, dtype=torch.int32)
        moved = place + count  # a slot that gets no token keeps all its inputs where they are
        kept = torch.where(moved < past, slot * past + moved, slots * past + last - (past - 1 - place))
        return before, kept.flatten()


class ConvolutionRecorder(StateRecorder):
    def convolve(self, layer_idx: int, index: int, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        kernel = weight.shape[-1]
        if kernel < 2:
            raise UnsupportedModelError(
                f"layer {layer_idx} keeps the inputs of a convolution with a kernel of {kernel}"
            )
        self.read_before(layer_idx, index, inputs, kernel - 1)
        return inputs

    def read_before(self, layer_idx: int, index: int, inputs: Tensor, past: int) -> Tensor:
        _, channels, tokens = inputs.shape
        self.add_state("inputs of several convolutions in one place", layer_idx, index, past, channels)
        return inputs.new_zeros((tokens, channels, past))
