# SPDX-License-Identifier: Apache-2.0
"""Layers that take a state on in code of their own: what their operators are read as, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from feature_models import FEATURES
from torch import Tensor, nn

from optimum_neuron.errors import UnsupportedModelError
from optimum_neuron.parity.inspect import look_at
from optimum_neuron.step.cache_needs import StepCache
from optimum_neuron.step.features.own_code.layers_by_token import set_own_states
from optimum_neuron.step.features.recurrence.recurrence import RecurrenceBackend, ScanCall, ScanKind
from optimum_neuron.step.model_spec import KINDS
from optimum_neuron.step.serving import Backends, serving


TOKENS, HEADS, DIM = 5, 2, 4
SIZE = HEADS * DIM
Body = Callable[[Tensor, Any], tuple[Any, Any]]


class Noting(RecurrenceBackend):
    """Backends of all kinds, which keep what they are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[ScanKind, ScanCall]] = []
        self.inputs: list[tuple[int, int, Tensor, int]] = []

    def scan(self, kind: ScanKind, call: ScanCall) -> Tensor:
        self.number_scan()
        self.calls.append((kind, call))
        return call.value + 100

    def read_before(self, layer_idx: int, index: int, inputs: Tensor, past: int) -> Tensor:
        self.inputs.append((layer_idx, index, inputs, past))
        return torch.arange(past).expand(TOKENS, inputs.shape[1], past) + 100.0


class Layer(nn.Module):
    """Takes a state on that it has a cache keep."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body

    def forward(self, hidden_states: Tensor, past_key_values: StepCache) -> Any:
        state = past_key_values.get_linear_cache(3)
        output, state = self.body(hidden_states, state)
        past_key_values.set_linear_cache(3, state)
        return output


class Delayed(nn.Module):
    """Goes on with its last input, and convolves the last ones by itself."""

    def __init__(self, kept: Callable[[Tensor], Tensor] = lambda x: x[:, -1]) -> None:
        super().__init__()
        self.kept = kept
        self.convolution = nn.Conv1d(SIZE, SIZE, 3, groups=SIZE)

    def forward(self, hidden_states: Tensor, past_key_values: StepCache) -> Tensor:
        assert past_key_values.has_previous_state(3)
        cached: Any = past_key_values.layers[3].conv_states[0]
        inputs = torch.cat([cached, hidden_states.transpose(1, 2)], dim=-1)
        past_key_values.update_conv_state(nn.functional.pad(inputs[..., -2:], (0, 0)), 3)
        earlier: Any = past_key_values.layers[3].recurrent_states[0].unsqueeze(1)
        before = torch.cat([earlier, hidden_states[:, :-1]], dim=1)
        past_key_values.update_recurrent_state(self.kept(hidden_states), 3)
        return torch.cat([self.convolution(inputs).transpose(1, 2), before], dim=-1)


def run(layer: nn.Module, hidden: Tensor) -> tuple[Any, Noting]:
    noting: Any = Noting()
    backends = Backends(dict.fromkeys(KINDS, noting))
    set_own_states(layer)
    with torch.no_grad(), serving(backends, torch.arange(TOKENS)):
        return layer(hidden, past_key_values=StepCache(0, None, backends, {})), noting


@pytest.fixture
def hidden() -> Tensor:
    return torch.randn(1, TOKENS, SIZE)


def heads_of(hidden: Tensor) -> Tensor:
    return hidden.view(TOKENS, 1, HEADS, DIM).transpose(1, 2)


def matrices(decay: Tensor | Callable[[], Tensor]) -> Body:
    def body(hidden: Tensor, state: Any) -> tuple[Tensor, Any]:
        assert hidden.shape == (TOKENS, 1, SIZE)  # each token a text of its own
        x = heads_of(hidden)
        state = (decay if isinstance(decay, Tensor) else decay()) * state
        state = state + torch.matmul((2 * x).transpose(-1, -2), 3 * x)
        return torch.matmul(x, state).transpose(1, 2).reshape(TOKENS, 1, SIZE), state

    return body


def test_matrices_are_a_scan_of_all_tokens(hidden: Tensor) -> None:
    slope = torch.tensor([0.5, 1e-4])[:, None, None]
    output, noting = run(Layer(matrices(lambda: torch.exp(-slope))), hidden)
    [(kind, call)] = noting.calls
    x = heads_of(hidden[0])[:, :, 0]
    assert kind == "state_space_scan" and noting.layer_idx == 3
    assert torch.equal(call.query, x) and torch.equal(call.key, 2 * x) and torch.equal(call.value, 3 * x)
    assert torch.equal(call.decay, -slope[:, 0, 0].expand(TOKENS, HEADS))  # not the logarithm of a rounded exponential
    assert torch.equal(output, (3 * x + 100).reshape(1, TOKENS, SIZE))


def test_a_decay_that_was_no_exponential_and_one_for_each_row(hidden: Tensor) -> None:
    decay = torch.rand(HEADS, DIM, 1)
    decay[0, 0] = 0
    _, noting = run(Layer(matrices(decay)), hidden)
    found = noting.calls[0][1].decay
    assert found.shape == (TOKENS, HEADS, DIM) and found.isfinite().all()
    torch.testing.assert_close(found.exp(), decay[..., 0].expand(TOKENS, HEADS, DIM))


def test_last_inputs_and_one_that_is_told_later(hidden: Tensor) -> None:
    layer = Delayed()
    output, noting = run(layer, hidden)
    assert [(each[0], each[1], each[3]) for each in noting.inputs] == [(3, 0, 1), (3, 1, 2)]
    assert all(torch.equal(each[2], hidden.transpose(1, 2)) for each in noting.inputs)
    assert torch.equal(output[..., SIZE:], torch.full((1, TOKENS, SIZE), 100.0))
    windows = torch.cat([torch.tensor([100.0, 101.0]).expand(TOKENS, SIZE, 2), hidden[0, :, :, None]], -1)
    with torch.no_grad():
        torch.testing.assert_close(output[0, :, :SIZE], layer.convolution(windows)[..., 0])
    with pytest.raises(UnsupportedModelError, match="layer 3 keeps the state of a recurrence of its own"):
        run(Delayed(kept=lambda x: x), hidden)


def test_a_state_in_an_attribute_that_a_layer_forgets_is_refused_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    block = FEATURES["vectors"].model().model.layers[0].temporal_block
    part, forward = block.rg_lru, type(block.rg_lru).forward

    def forget(self: Any, *args: Any) -> Any:
        before = self.recurrent_states
        output = forward(self, *args)
        self.recurrent_states = before
        return output

    monkeypatch.setattr(part, "recurrent_states", "before")
    monkeypatch.setattr(type(part), "forward", forget)
    with pytest.raises(UnsupportedModelError, match="layer 0 keeps the state of a recurrence of its own"):
        look_at(FEATURES["vectors"].model())
    assert part.recurrent_states == "before" and block.conv1d_state is None


def bodies() -> Iterator[tuple[str, Body, str]]:
    """What a layer might do with its state, and the reason for which it is refused."""

    def taken_on(hidden: Tensor, state: Any) -> Any:
        return 0.5 * torch.ones(HEADS, 1, 1) * state + heads_of(hidden).transpose(-1, -2) @ heads_of(hidden)

    yield "sum", lambda x, state: (state.sum(), state), r"reads \.sum of it"
    yield "add", lambda x, state: (x, torch.add(x, state)), "calls add on it"
    yield "last", lambda x, state: (x, state[:, -1]), "takes .* of it"
    yield "number", lambda x, state: (x, state * 0.5), "multiplies it by float"
    yield "join", lambda x, state: (torch.cat([state, x], 1), state), r"joins it to \[5, 1, 8\]"
    yield "none", lambda x, state: (x, x[..., None] * state + 1), "adds int to it"
    yield "same", lambda x, state: (x, state), "layer 3 keeps the state of a recurrence of its own"
    yield "unread", lambda x, state: (x, taken_on(x, state)), "layer 3 keeps the state of a recurrence of its own"
    yield "columns", matrices(torch.ones(HEADS, DIM, DIM)), "a decay of its own for each of its columns"
    yield "all", lambda x, state: (taken_on(x, state).to(x.dtype), state), "reads all of its matrices"
    yield "query", lambda x, state: (x @ taken_on(x, state), state), r"by \[5, 1, 8\], which is no query"
    yield "outer", lambda x, state: (heads_of(x).mT @ heads_of(x) + x, state), r"calls add on it"

    def twice(x: Tensor, state: Any) -> Any:
        state = taken_on(x, state)
        return heads_of(x) @ state + heads_of(x) @ state, state

    yield "twice", twice, "reads it twice"

    def another(x: Tensor, state: Any) -> Any:
        return heads_of(x) @ taken_on(x, state), x

    yield "another", another, "layer 3 keeps the state of a recurrence of its own"


@pytest.mark.parametrize(("body", "reason"), [pytest.param(*rest, id=name) for name, *rest in bodies()])
def test_other_uses_of_a_state_are_refused_by_name(body: Body, reason: str, hidden: Tensor) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        run(Layer(body), hidden)
