# SPDX-License-Identifier: Apache-2.0
"""The kernel of recurrences: a token's result and what a slot keeps follow from that slot's own tokens alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import pytest
import torch
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from kernel_calls import Kernels, Planned, RefusedError, Tensors, int32, same_bits
from random_steps import steps_of
from torch import Tensor

from optimum_neuron.kernels.operators import NAMESPACE
from optimum_neuron.kernels.steps.access import PlanError
from optimum_neuron.kernels.steps.steps import Walk


pytestmark = pytest.mark.usefixtures("torch_with_one_thread")
NAN = float("nan")
SLOTS = 5


@dataclass(frozen=True)
class Text:
    """The inputs `[tokens, ...]` of a recurrence."""

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    share: Tensor | None
    rates: Tensor | None

    @classmethod
    def random(cls, kind: str, tokens: int, heads: int, key_heads: int, key_dim: int, value_dim: int) -> Text:
        query, key = (torch.nn.functional.normalize(torch.randn(tokens, key_heads, key_dim), dim=-1) for _ in "qk")
        decays = {"by row": key_dim, "by rates": value_dim}.get(kind.partition(" ")[2], 1)
        decay = torch.rand(tokens, heads, decays) * 0.5 + 0.5
        share = torch.rand(tokens, heads) if kind.startswith("delta") else None
        rates = -torch.rand(key_dim, value_dim) if kind.endswith("rates") else None
        return cls(query, key, torch.randn(tokens, heads, value_dim), decay, share, rates)

    def tokens(self) -> dict[str, Tensor | None]:
        """What each token has its own of."""
        return {name: each for name, each in vars(self).items() if name != "rates"}

    def at(self, places: object) -> Text:
        chosen = {name: None if each is None else each[places].contiguous() for name, each in self.tokens().items()}
        return replace(self, **chosen)

    def state(self, slots: int = SLOTS) -> Tensor:
        return torch.full((slots + 1, self.value.shape[1], self.key.shape[2], self.value.shape[2]), NAN)

    def run(self, kernels: Kernels, state: Tensor, slots: object, positions: object) -> Tensor:
        inputs = (self.query, self.key, self.value, self.decay, self.share, self.rates)
        return kernels.walk(*inputs, state, int32(slots), int32(positions))

    def alone(self, kernels: Kernels) -> tuple[Tensor, Tensor]:
        """As one text in one call: results, and the state behind it."""
        state = self.state()
        tokens = len(self.value)
        return self.run(kernels, state, [2] * tokens, range(tokens)), state[2]

    def exact(self) -> tuple[Tensor, Tensor]:
        """The same in float64, as the formula stands."""
        each = self.value.shape[1] // self.key.shape[1]
        query, key = (part.double().repeat_interleave(each, 1) for part in (self.query, self.key))
        state, results = torch.zeros(self.state().shape[1:], dtype=torch.float64), []
        for token, value in enumerate(self.value.double()):
            decay = self.decay[token].double()
            if self.rates is not None:
                state = state * torch.exp(self.rates.double() * decay[:, None])
            else:
                state = state * decay[:, :, None]
            if self.share is not None:
                known = (state * key[token, :, :, None]).sum(1)
                value = (value - known) * self.share[token, :, None].double()
            state = state + key[token, :, :, None] * value[:, None]
            results.append((state * query[token, :, :, None]).sum(1))
        return torch.stack(results), state


# Heads, key heads, rows and columns of a state: no multiples of a vector or a block, and the sizes that models have.
SHAPES = [(1, 1, 1, 1), (4, 2, 7, 33), (2, 1, 16, 24), (3, 3, 64, 64), (2, 1, 128, 128), (1, 1, 3, 200)]
KINDS = ["scan", "delta", "scan by row", "delta by row", "scan by rates"]
with_kinds = pytest.mark.parametrize("kind", KINDS)


@with_kinds
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_and_state_match_float64(kernels: Kernels, shape: tuple[int, ...], kind: str) -> None:
    text = Text.random(kind, 40, *shape)
    for got, exact in zip(text.alone(kernels), text.exact(), strict=True):
        assert (got.double() - exact).abs().max() <= 2e-6 * exact.abs().max().clamp(min=1)


@with_kinds
def test_a_text_of_one_token_repeated_stays_close_to_float64(kernels: Kernels, kind: str) -> None:
    text = Text.random(kind, 1, 2, 1, 64, 64).at([0] * 300)
    bound = 2e-6 if kind.startswith("delta") else 300 * 2**-24  # roundings of a sum that is never corrected add up
    for got, exact in zip(text.alone(kernels), text.exact(), strict=True):
        assert (got.double() - exact).abs().max() <= bound * exact.abs().max().clamp(min=1)


@examples(40)
@given(
    st.sampled_from(SHAPES),
    st.sampled_from(KINDS),
    st.lists(st.integers(1, 20), min_size=1, max_size=SLOTS),
    st.integers(0, 2**32),
)
def test_cuts_neighbours_slots_and_threads_change_no_bit(
    best_kernels: Kernels, shape: tuple[int, ...], kind: str, sizes: list[int], seed: int
) -> None:
    choose = Random(seed)
    texts = [Text.random(kind, size, *shape) for size in sizes]
    texts = [replace(text, rates=texts[0].rates) for text in texts]  # which a layer has, not a text
    slots = choose.sample(range(SLOTS), len(texts))
    state = texts[0].state()
    results: list[list[Tensor]] = [[] for _ in texts]
    for places in steps_of(choose, sizes):
        parts = {
            name: None
            if getattr(texts[0], name) is None
            else torch.stack([_row(texts[i], name, at) for i, at in places])
            for name in texts[0].tokens()
        }
        names = [SLOTS if at is None else slots[number] for number, at in places]
        with best_kernels.with_threads(choose.choice([1, 3])):
            output = replace(texts[0], **parts).run(best_kernels, state, names, [at or 0 for _, at in places])
        for row, (number, at) in zip(output, places, strict=True):
            if at is not None:
                results[number].append(row)
            assert at is not None or not row.any()
    for number, text in enumerate(texts):
        rows, kept = text.alone(best_kernels)
        assert same_bits(torch.stack(results[number]), rows) and same_bits(state[slots[number]], kept)
    assert state[[slot for slot in range(SLOTS + 1) if slot not in slots]].isnan().all()


def _row(text: Text, name: str, place: int | None) -> Tensor:
    rows: Tensor = getattr(text, name)
    return rows[0] * NAN if place is None else rows[place]


def test_a_broken_token_harms_no_later_owner_of_its_slot(kernels: Kernels) -> None:
    text = Text.random("delta", 6, 2, 1, 16, 24)
    rows, kept = text.alone(kernels)
    state = text.state()
    replace(text, value=text.value * NAN).run(kernels, state, [2] * 6, range(6))
    assert state[2].isnan().all()
    assert same_bits(text.run(kernels, state, [2] * 6, range(6)), rows) and same_bits(state[2], kept)


def test_slots_that_are_out_of_range_or_come_twice_are_refused(kernels: Kernels) -> None:
    for slots in ([0, -1, 1], [0, SLOTS + 1, 1], [0, 1, 0], [3, SLOTS, 1, 3]):
        text = Text.random("scan", len(slots), 1, 1, 4, 4)
        state = torch.zeros_like(text.state())
        with pytest.raises(RefusedError):
            text.run(kernels, state, slots, range(len(slots)))
        assert not state.any()


@pytest.mark.parametrize("kind", ["delta by row", "scan by rates"])
def test_operands_that_do_not_fit_are_refused(best_kernels: Kernels, kind: str) -> None:
    text = Text.random(kind, 3, 4, 2, 8, 6)
    fitting = vars(text) | {
        "state": text.state(),
        "slots": int32([0, 0, 1]),
        "positions": int32([0, 1, 0]),
        "output": torch.zeros_like(text.value),
    }
    for name, operand in fitting.items():
        if operand is not None:
            short = operand[:-1, ..., :-1] if operand.dim() > 1 else operand[:-1]
            with pytest.raises(PlanError, match=r"recurrence|belongs"):
                run_walk(best_kernels, fitting | {name: short})
    both = {"share": torch.rand(3, 4), "rates": torch.rand(8, 6), "decay": torch.rand(3, 4, 6)}
    with pytest.raises(PlanError, match="shares and rates"):
        run_walk(best_kernels, fitting | both)


def run_walk(kernels: Kernels, operands: dict[str, Tensor | None]) -> None:
    tensors = Tensors()
    kernels.run(Walk(**{name: tensors.optional(each) for name, each in operands.items()}), tensors)


def test_a_plan_walks_the_live_tokens_alone(kernels: Kernels) -> None:
    """In an exported graph, between elementwise operators, of which a run leaves out what follows the last live token."""
    text = Text.random("delta", 8, 2, 1, 16, 24)

    def step(query: Tensor, value: Tensor, decay: Tensor, state: Tensor, slots: Tensor, columns: Tensor) -> Tensor:
        walk = getattr(torch.ops, NAMESPACE).walk
        share = torch.sigmoid(decay[..., 0])
        return (
            walk(query, query * 2, value, torch.exp(decay), share, None, state, slots, columns).to(torch.bfloat16) + 1
        )

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("state", text.state())

        def forward(self, query: Tensor, value: Tensor, decay: Tensor, slots: Tensor, columns: Tensor) -> list[Tensor]:
            return [step(query, value, decay, self.state, slots, columns)]

    inputs = (text.query, text.value, -text.decay, int32([1] * 8), int32(range(8)))
    module = Step()
    plan = Planned(kernels, module, inputs, tokens=8)
    assert not plan.calls_torch
    [whole] = plan(*inputs)
    kept = module.state[1].clone()
    [part] = plan(*inputs, live=5)
    assert same_bits(part[:5], whole[:5]) and not torch.equal(module.state[1], kept)
    rest = [each[5:].contiguous() for each in inputs[:3]]
    short = Planned(kernels, module, (*rest, int32([1] * 3), int32(range(5, 8))))
    [end] = short(*rest, int32([1] * 3), int32(range(5, 8)))
    assert same_bits(end, whole[5:]) and same_bits(module.state[1], kept)
