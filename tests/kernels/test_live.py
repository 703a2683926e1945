# SPDX-License-Identifier: Apache-2.0
"""What runs leave out: steps for fewer tokens give live tokens the bits that they have with all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from kernel_calls import Kernels, Planned, threads
from random_graphs import Graph
from torch import Tensor, nn
from torch.nn import functional

from optimum_neuron.kernels.run.bound_plan import count_state_steps
from optimum_neuron.kernels.steps.steps import Sample, Tokens
from optimum_neuron.step.sampling.sampler import sample
from optimum_neuron.targets.cpu.ops import OPS


TOKENS = 6


@examples(200)
@given(st.sampled_from((torch.float32, torch.bfloat16)), st.booleans(), st.data())
def test_random_graphs_have_the_bits_of_torch_for_live_tokens_with_any_number_of_threads(
    best_kernels: Kernels, dtype: torch.dtype, has_tokens: bool, data: st.DataObject
) -> None:
    small, last = st.integers(1, 3), data.draw(st.sampled_from((1, 2, 3, TOKENS, 33, 300)))
    first, second = (TOKENS, TOKENS) if has_tokens else (data.draw(small), data.draw(small))
    others = ((second, 5), (5,)) if has_tokens else ((last,), (second, 1))
    shapes = ((first, data.draw(small), last), *others)
    torch.manual_seed(data.draw(st.integers(0, 99)))
    inputs = [torch.randint(-5, 6, shape).to(dtype) for shape in shapes]
    graph = Graph(data, inputs)
    for _ in range(data.draw(st.integers(4, 16))):
        graph.grow()
    graph.finish()
    if has_tokens:
        graph.outputs = [i for i, each in enumerate(graph.values) if each.dim() and len(each) == TOKENS]
    planned, expected = Planned(best_kernels, graph, inputs, TOKENS if has_tokens else 0), graph(*inputs)
    for live in (*range(1, TOKENS + 1), 1 << 40) if has_tokens else (1 << 40,) * 3:
        with threads(data.draw(st.integers(1, 3))):
            results = planned(*inputs, live=live)
        for number, found, wanted in zip(graph.outputs, results, expected, strict=True):
            found, wanted = (found[:live], wanted[:live]) if has_tokens else (found, wanted)
            assert torch.equal(found, wanted), (number, live, found, wanted)


class _Layer(nn.Module):
    """What layers do with tokens, those of a table among it, and the choice of rows at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(50, 32), nn.Linear(32, 48), nn.Linear(48, 32)
        self.requires_grad_(False)

    def forward(self, ids: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        x = self.table(ids)[None]
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        heads = self.up(normed).view(1, TOKENS, 3, 16).transpose(1, 2)
        turned = torch.cat([-heads[..., 8:], heads[..., :8]], -1) * heads
        each = turned.transpose(1, 2).reshape(-1, 16)  # several rows of a token, as gated norms have them
        each = each * torch.rsqrt(each.square().mean(-1, keepdim=True) + 1e-6)
        x = x + self.down(functional.silu(each.view(1, TOKENS, 48)))
        scores, chosen = torch.topk(x[0], 4)
        return (x[:, OPS.output_rows(rows)][0] + 1, scores.softmax(-1), chosen.int())


def test_each_step_of_a_layer_ends_at_the_last_live_token(kernels: Kernels) -> None:
    inputs = [torch.randint(0, 50, (TOKENS,), dtype=torch.int32), torch.tensor([0, 1, 1, 2, 2, 3], dtype=torch.int32)]
    planned = Planned(kernels, _Layer(), inputs, TOKENS)
    assert all(step.tokens is not None for step in planned.plan.steps)
    whole = planned(*inputs)
    for live in range(1, TOKENS + 1):
        fewer = planned(*inputs, live=live)
        assert all(torch.equal(a[:live], b[:live]) for a, b in zip(fewer, whole, strict=True))


def _turned(tokens: Tensor) -> Tensor:
    """What a Map rotates as one row, though each element is a token's."""
    return torch.cat([-tokens[3:], tokens[:3]], -1)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 2 + (x * 2).sum(0),
        lambda x: (x * 2).flip(0) + 1,
        lambda x: (x * 2)[torch.tensor([5, 4, 3, 2, 1, 0])] + 1,
        lambda x: (x * 2).view(2, 3, 4).transpose(0, 1).reshape(6, 4) + 1,
        lambda x: (x * 2).t().contiguous().view(6, 4) + 1,
        lambda x: torch.cat([(x * 2)[1:], x[:1]]),
        lambda x: (x * 2).cumsum(0),
        lambda x: (x * 2) @ (x * 2).t(),
        lambda x: _turned(x[:, 0] * 2),
    ],
)
def test_what_tokens_take_from_one_another_is_computed_for_all(
    best_kernels: Kernels, function: Callable[[Tensor], Tensor]
) -> None:
    x = torch.arange(24.0).view(TOKENS, 4)
    planned = Planned(best_kernels, lambda x: (function(x),), [x], TOKENS)
    for live in range(1, TOKENS + 1):
        assert torch.equal(planned(x, live=live)[0][:live], function(x)[:live])


def test_tokens_are_chosen_for_live_rows_alone_in_one_step(kernels: Kernels) -> None:
    table = torch.randn(TOKENS, 300)
    inputs = [table, torch.tensor([[0, 1.0, 1.0, 0.0]] * TOKENS), torch.rand(TOKENS)]
    planned = Planned(kernels, lambda x, params, uniforms: (OPS.sample(x, params, uniforms),), inputs, TOKENS)
    sampled = [step for step in planned.plan.steps if isinstance(step, Sample)]
    assert planned.calls_torch == [] and [step.tokens for step in sampled] == [Tokens(0, TOKENS)]
    expected = sample(*inputs)
    for live in range(1, TOKENS + 1):
        assert torch.equal(planned(*inputs, live=live)[0][:live], expected[:live])


class _Keeping(nn.Module):
    """Writes to its state amid what its output needs."""

    def __init__(self, write: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self._write = write
        self.up = nn.Linear(8, 8).requires_grad_(False)
        self.register_buffer("state", torch.zeros(3, 8))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        y = self.up(x) * 2
        self._write(self.state, y)
        return (self.up(y).sort(-1).values + self.state.sum(),)


@pytest.mark.parametrize(
    "write",
    [
        lambda state, y: state.copy_(y * 3),
        lambda state, y: state.index_copy_(0, torch.tensor([2, 0, 1]), y),
        lambda state, y: state[1:].add_(y[:2]),
    ],
    ids=["all", "by index", "in place"],
)
def test_whatever_writes_to_a_state_is_run(best_kernels: Kernels, write: Callable[[Tensor, Tensor], object]) -> None:
    module, x = _Keeping(write), torch.randn(3, 8)
    planned = Planned(best_kernels, module, [x])
    assert 0 < count_state_steps(planned.plan) < len(planned.plan.steps)
    found = []
    by_module = lambda inputs, _: module(*map(torch.from_numpy, inputs))  # noqa: E731
    for run in (planned._bound.run, planned._bound.run_for_states, by_module):
        module.state.fill_(0.25)
        run([x.numpy()], 3)
        found.append(module.state.clone())
    assert torch.equal(found[0], found[1])
    assert torch.allclose(found[0], found[2], atol=1e-6) and not torch.equal(found[0], torch.full((3, 8), 0.25))
