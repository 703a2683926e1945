# SPDX-License-Identifier: Apache-2.0
"""The kernels of recurrences and short convolutions: a token's result and what a slot keeps follow from that slot's own tokens alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

import pytest
import torch
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from kernel_calls import DTYPES, NAN, Kernels, RefusedError, guarded, int32, random, same_bits, with_dtypes
from torch import Tensor

from optimum_neuron.kernels.steps.steps import Convolve, Step, Walk


pytestmark = pytest.mark.usefixtures("torch_with_one_thread")
SLOTS = 5
Given = dict[str, Tensor | None]


@dataclass(frozen=True)
class Text:
    """The inputs of a kernel of each token, of the layer, and what a slot keeps; `output` is one with the shape of the results."""

    make: Callable[..., Step]
    by_token: Given
    layer: Given
    kept: Tensor
    output: str

    def at(self, places: Sequence[int | None]) -> Text:
        """The tokens at some places; NaN for None."""
        chosen = {
            name: None
            if each is None
            else torch.stack([each[0] * NAN if place is None else each[place] for place in places])
            for name, each in self.by_token.items()
        }
        return replace(self, by_token=chosen)

    @property
    def state(self) -> Tensor:
        return self.kept.expand(SLOTS + 1, *self.kept.shape) * NAN

    def run(self, kernels: Kernels, state: Tensor, slots: Sequence[int], positions: Sequence[int]) -> Tensor:
        shaped = self.by_token[self.output]
        assert shaped is not None
        output = guarded(shaped.shape, torch.float32)
        places = {"slots": int32(slots), "positions": int32(positions)}
        return kernels.call(self.make, output, **self.by_token, **self.layer, state=state, **places)

    def alone(self, kernels: Kernels, tokens: int) -> tuple[Tensor, Tensor]:
        """As one text in one call: results, and the state behind it."""
        state = self.state
        return self.run(kernels, state, [2] * tokens, range(tokens)), state[2]


def recurrence(kind: str, tokens: int, heads: int, key_heads: int, key_dim: int, value_dim: int) -> Text:
    query, key = torch.nn.functional.normalize(torch.randn(2, tokens, key_heads, key_dim), dim=-1)
    decays = {"by row": key_dim, "by rates": value_dim}.get(kind.partition(" ")[2], 1)
    share = torch.rand(tokens, heads) if kind.startswith("delta") else None
    rates = -torch.rand(key_dim, value_dim) if kind.endswith("rates") else None
    decay = torch.rand(tokens, heads, decays) * 0.5 + 0.5
    own = {"query": query, "key": key, "value": torch.randn(tokens, heads, value_dim), "decay": decay, "share": share}
    return Text(Walk, own, {"rates": rates}, torch.zeros(heads, key_dim, value_dim), "value")


def convolution(tokens: int, channels: int, past: int, dtype: torch.dtype, *, bias: bool = True) -> Text:
    layer = {"weight": torch.randn(past + 1, channels), "bias": torch.randn(channels) if bias else None}
    inputs = {"inputs": random(tokens, channels, dtype=dtype)}
    return Text(Convolve, inputs, layer, torch.zeros(past, channels, dtype=dtype), "inputs")


# Heads, key heads, rows and columns of a state: no multiples of a vector or a block, and the sizes that models have.
STATES = [(1, 1, 1, 1), (4, 2, 7, 33), (2, 1, 16, 24), (3, 3, 64, 64), (2, 1, 128, 128), (1, 1, 3, 200)]
KINDS = ["scan", "delta", "scan by row", "delta by row", "scan by rates"]


def walked(text: Text) -> tuple[Tensor, Tensor]:
    """Results and state in float64, as the formula stands."""
    query, key, value, decay, share = (None if each is None else each.double() for each in text.by_token.values())
    assert query is not None and key is not None and value is not None and decay is not None
    query, key = (part.repeat_interleave(value.shape[1] // key.shape[1], 1) for part in (query, key))
    state, results, rates = text.kept.double(), [], text.layer["rates"]
    for token, own in enumerate(value):
        if rates is not None:
            state = state * torch.exp(rates.double() * decay[token][:, None])
        else:
            state = state * decay[token][:, :, None]
        if share is not None:
            known = (state * key[token, :, :, None]).sum(1)
            own = (own - known) * share[token, :, None]
        state = state + key[token, :, :, None] * own[:, None]
        results.append((state * query[token, :, :, None]).sum(1))
    return torch.stack(results), state


@pytest.mark.parametrize("kind", KINDS)
def test_results_and_state_of_recurrences_match_float64(kernels: Kernels, kind: str) -> None:
    texts = [recurrence(kind, 40, *shape) for shape in STATES]
    # Of one token repeated: roundings add up.
    texts.append(recurrence(kind, 1, 2, 1, 64, 64).at([0] * 300))
    for text, tokens in zip(texts, [40] * len(STATES) + [300], strict=True):
        bound = 2e-6 if tokens == 40 else 300 * 2**-24
        for got, exact in zip(text.alone(kernels, tokens), walked(text), strict=True):
            assert (got.double() - exact).abs().max() <= bound * exact.abs().max().clamp(min=1)


# Channels and inputs before a token's own: no multiples of a vector, more than a task has, and what models have.
CHANNELS = [(1, 1), (7, 3), (33, 2), (64, 3), (700, 3), (20, 9)]


@with_dtypes
@pytest.mark.parametrize("shape", CHANNELS, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_results_of_convolutions_are_those_of_torch_to_the_bit(
    kernels: Kernels, shape: tuple[int, int], dtype: torch.dtype, bias: bool
) -> None:
    """In float32: a product and a sum at a time, from a token's own input backwards. Rows may lie apart."""
    text = convolution(12, *shape, dtype, bias=bias)
    weight, own_bias, inputs = text.layer["weight"], text.layer["bias"], text.by_token["inputs"]
    assert weight is not None and inputs is not None
    for token, found in enumerate(text.alone(kernels, 12)[0]):
        row = inputs[token].float() * weight[-1]
        for back in range(1, min(shape[1], token) + 1):
            row = row + inputs[token - back].float() * weight[-1 - back]
        assert same_bits(found, row if own_bias is None else row + own_bias)
    apart = torch.full((12, shape[0] + 5), NAN, dtype=dtype)[:, 2 : shape[0] + 2].copy_(inputs)
    wide = replace(text, by_token={"inputs": apart})
    (found, kept), (expected, state) = wide.alone(kernels, 12), text.alone(kernels, 12)
    assert same_bits(found, expected) and same_bits(kept, state) and same_bits(state[-12:], inputs[-shape[1] :])


def _steps_of(choose: Random, sizes: Sequence[int]) -> Iterator[list[tuple[int, int | None]]]:
    """Texts of so many tokens in any order and any cut: each step a list of a text and its token, None in idle rows."""
    done = [0] * len(sizes)
    while any(begin < size for begin, size in zip(done, sizes, strict=True)):
        places: list[tuple[int, int | None]] = []
        for number in choose.sample(range(len(sizes)), len(sizes)):
            take = choose.randint(0, min(sizes[number] - done[number], 7))
            for place in range(done[number], done[number] + take):
                places += [(number, None)] * (choose.random() < 0.2) + [(number, place)]
            done[number] += take
        if places:
            yield places


@examples(80)
@given(
    st.one_of(
        st.builds(lambda shape, kind: recurrence(kind, 100, *shape), st.sampled_from(STATES), st.sampled_from(KINDS)),
        st.builds(
            lambda shape, dtype: convolution(100, *shape, dtype), st.sampled_from(CHANNELS), st.sampled_from(DTYPES)
        ),
    ),
    st.lists(st.integers(1, 20), min_size=1, max_size=SLOTS),
    st.integers(0, 2**32),
)
def test_cuts_neighbours_slots_and_threads_change_no_bit(
    best_kernels: Kernels, text: Text, sizes: list[int], seed: int
) -> None:
    choose = Random(seed)
    begins = [sum(sizes[:number]) for number in range(len(sizes))]
    slots = choose.sample(range(SLOTS), len(sizes))
    results: list[list[Tensor]] = [[] for _ in sizes]
    state = text.state
    for places in _steps_of(choose, sizes):
        step = text.at([None if at is None else begins[number] + at for number, at in places])
        names = [SLOTS if at is None else slots[number] for number, at in places]
        with best_kernels.with_threads(choose.choice([1, 3])):
            output = step.run(best_kernels, state, names, [at or 0 for _, at in places])
        for row, (number, at) in zip(output, places, strict=True):
            if at is not None:
                results[number].append(row)
            assert at is not None or not row.any()
    for number, size in enumerate(sizes):
        rows, kept = text.at(range(begins[number], begins[number] + size)).alone(best_kernels, size)
        assert same_bits(torch.stack(results[number]), rows) and same_bits(state[slots[number]], kept)
    assert state[[slot for slot in range(SLOTS + 1) if slot not in slots]].isnan().all()


@pytest.mark.parametrize("slots", [[0, -1, 1], [0, SLOTS + 1, 1], [0, 1, 0], [3, SLOTS, 1, 3]], ids=str)
def test_slots_that_are_out_of_range_or_come_twice_are_refused(kernels: Kernels, slots: list[int]) -> None:
    for text in (recurrence("scan", len(slots), 1, 1, 4, 4), convolution(len(slots), 4, 3, torch.float32)):
        state = torch.zeros_like(text.state)
        with pytest.raises(RefusedError):
            text.run(kernels, state, slots, range(len(slots)))
        assert not state.any()
