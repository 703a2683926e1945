# SPDX-License-Identifier: Apache-2.0
"""The kernel of short convolutions: a token's result and what a slot keeps follow from that slot's own tokens alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import pytest
import torch
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from kernel_calls import DTYPES, Kernels, Planned, RefusedError, Tensors, int32, random, same_bits, with_dtypes
from random_steps import steps_of
from torch import Tensor

from optimum_neuron.kernels.operators import NAMESPACE
from optimum_neuron.kernels.steps.access import PlanError
from optimum_neuron.kernels.steps.steps import Convolve, Map


pytestmark = pytest.mark.usefixtures("torch_with_one_thread")
NAN = float("nan")
SLOTS = 5
# Channels and inputs before a token's own: no multiples of a vector, more than a task has, and what models have.
SHAPES = [(1, 1), (7, 3), (33, 2), (64, 3), (700, 3), (20, 9)]


@dataclass(frozen=True)
class Layer:
    """A convolution, and the inputs `[tokens, channels]` of a text."""

    inputs: Tensor
    weight: Tensor
    bias: Tensor | None

    @classmethod
    def random(cls, tokens: int, channels: int, past: int, dtype: torch.dtype, *, bias: bool = True) -> Layer:
        own_bias = torch.randn(channels) if bias else None
        return cls(random(tokens, channels, dtype=dtype), torch.randn(past + 1, channels), own_bias)

    def state(self) -> Tensor:
        past, channels = len(self.weight) - 1, self.inputs.shape[1]
        return torch.full((SLOTS + 1, past, channels), NAN, dtype=self.inputs.dtype)

    def run(self, kernels: Kernels, state: Tensor, slots: object, positions: object) -> Tensor:
        return kernels.convolve(self.inputs, self.weight, self.bias, state, int32(slots), int32(positions))

    def alone(self, kernels: Kernels) -> Tensor:
        tokens = len(self.inputs)
        return self.run(kernels, self.state(), [2] * tokens, range(tokens))

    def expected(self) -> Tensor:
        """By torch in float32: a product and a sum at a time, from a token's own input backwards."""
        rows = []
        for token in range(len(self.inputs)):
            row = self.inputs[token].float() * self.weight[-1]
            for back in range(1, min(len(self.weight) - 1, token) + 1):
                row = row + self.inputs[token - back].float() * self.weight[-1 - back]
            rows.append(row if self.bias is None else row + self.bias)
        return torch.stack(rows)


@with_dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_are_those_of_torch_to_the_bit(kernels: Kernels, shape: tuple[int, int], dtype: torch.dtype) -> None:
    for bias in (True, False):
        layer = Layer.random(12, *shape, dtype, bias=bias)
        assert same_bits(layer.alone(kernels), layer.expected())


@examples(40)
@given(
    st.sampled_from(SHAPES),
    st.sampled_from(DTYPES),
    st.lists(st.integers(1, 20), min_size=1, max_size=SLOTS),
    st.integers(0, 2**32),
)
def test_cuts_neighbours_slots_and_threads_change_no_bit(
    best_kernels: Kernels, shape: tuple[int, int], dtype: torch.dtype, sizes: list[int], seed: int
) -> None:
    choose = Random(seed)
    layer = Layer.random(1, *shape, dtype)
    texts = [replace(layer, inputs=random(size, shape[0], dtype=dtype)) for size in sizes]
    slots = choose.sample(range(SLOTS), len(texts))
    state = layer.state()
    results: list[list[Tensor]] = [[] for _ in texts]
    for places in steps_of(choose, sizes):
        rows = [texts[i].inputs[0] * NAN if at is None else texts[i].inputs[at] for i, at in places]
        apart = torch.full((len(rows), shape[0] + 5), NAN, dtype=dtype)[:, 2 : shape[0] + 2]
        apart.copy_(torch.stack(rows))
        names = [SLOTS if at is None else slots[number] for number, at in places]
        with best_kernels.with_threads(choose.choice([1, 3])):
            step = replace(layer, inputs=apart)
            output = step.run(best_kernels, state, names, [at or 0 for _, at in places])
        for row, (number, at) in zip(output, places, strict=True):
            if at is not None:
                results[number].append(row)
            assert at is not None or not row.any()
    for number, text in enumerate(texts):
        assert same_bits(torch.stack(results[number]), text.expected())
        last = text.inputs[-shape[1] :]
        assert same_bits(state[slots[number]][-len(last) :], last)
    assert state[[slot for slot in range(SLOTS + 1) if slot not in slots]].isnan().all()


@pytest.mark.parametrize("slots", [[0, -1, 1], [0, SLOTS + 1, 1], [0, 1, 0], [3, SLOTS, 1, 3]], ids=str)
def test_slots_that_are_out_of_range_or_come_twice_are_refused(kernels: Kernels, slots: list[int]) -> None:
    layer = Layer.random(len(slots), 4, 3, torch.float32)
    state = torch.zeros_like(layer.state())
    with pytest.raises(RefusedError):
        layer.run(kernels, state, slots, range(len(slots)))
    assert not state.any()


def test_operands_that_do_not_fit_are_refused(best_kernels: Kernels) -> None:
    layer = Layer.random(3, 8, 3, torch.bfloat16)
    fitting = vars(layer) | {
        "state": layer.state(),
        "slots": int32([0, 0, 1]),
        "positions": int32([0, 1, 0]),
        "output": torch.zeros(3, 8),
    }
    for name, operand in fitting.items():
        others = [operand[:-1, ..., :-1] if operand.dim() > 1 else operand[:-1], operand.to(torch.float64)]
        for other in others:
            with pytest.raises(PlanError, match=r"convolution|belongs"):
                tensors = Tensors()
                best_kernels.run(
                    Convolve(**{key: tensors(other if key == name else each) for key, each in fitting.items()}),
                    tensors,
                )


def test_a_plan_convolves_the_live_tokens_alone(kernels: Kernels) -> None:
    """In an exported graph, behind other operators; what it hands on in channels is read as it lies."""
    layer = Layer.random(8, 24, 3, torch.bfloat16)

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("state", layer.state())

        def forward(self, inputs: Tensor, slots: Tensor, columns: Tensor) -> list[Tensor]:
            convolve = getattr(torch.ops, NAMESPACE).convolve
            output = convolve(inputs * 2, layer.weight, layer.bias, self.state, slots, columns)
            by_channel = torch.nn.functional.silu(output.to(torch.bfloat16).transpose(0, 1)[None])
            return [by_channel.transpose(1, 2)[0] + 1]

    inputs = (layer.inputs, int32([1] * 8), int32(range(8)))
    module = Step()
    plan = Planned(kernels, module, inputs, tokens=8)
    assert not plan.calls_torch and all(step.tokens is not None for step in plan.plan.steps)
    for step in plan.plan.steps:
        if isinstance(step, Map):  # none that only copies, none that steps from token to token
            assert any(item.op not in ("load", "store") for item in step.items)
            assert all(item.access.strides[-1] == 1 for item in step.items if item.access is not None)
    [whole] = plan(*inputs)
    kept = module.state[1].clone()
    [part] = plan(*inputs, live=5)
    assert same_bits(part[:5], whole[:5]) and same_bits(module.state[1], layer.inputs[2:5] * 2)
    rest = [each[5:].contiguous() for each in inputs]
    [end] = Planned(kernels, module, rest)(*rest)
    assert same_bits(end, whole[5:]) and same_bits(module.state[1], kept)
