# SPDX-License-Identifier: Apache-2.0
"""Models with recurrences as step graphs: what they keep, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from recurrent import model
from torch import Tensor

from optimum_neuron.config import NeuronConfig
from optimum_neuron.parity import comparison_runs, parity
from optimum_neuron.parity.inspect import inspect_model
from optimum_neuron.step.attention.state import KeyValueState
from optimum_neuron.step.cache_needs import CacheNeeds
from optimum_neuron.step.features.convolution.state import ConvolutionState
from optimum_neuron.step.features.recurrence import recurrent_functions
from optimum_neuron.step.features.recurrence.recurrence import ScanCall
from optimum_neuron.step.features.recurrence.state import RecurrentState
from optimum_neuron.step.model_spec import ModelSpec
from optimum_neuron.step.state_specs import state_specs


def test_what_a_model_keeps_is_found_by_running_it() -> None:
    spec = inspect_model(model("gated delta"))
    assert spec.states_of(RecurrentState) == (RecurrentState(0, 0, 4, 16, 8, 4 * (16 + 8 + 1 + 1)),)
    assert [each.layer_idx for each in spec.states_of(KeyValueState)] == [1] and not spec.reuses_prefixes
    assert ModelSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    config = NeuronConfig(batch_size=3, sequence_length=64, prefill_chunk_size=24, dtype="bfloat16")
    states = {state.name.removeprefix("kv_cache."): (state.shape, state.dtype) for state in state_specs(config, spec)}
    assert states["state_0_0"] == states["anchor_0_0"] == ((4, 4, 16, 8), "float32")
    assert states["tail_0_0"] == ((4, 16, 104), "float32") and states["scanned"] == ((4,), "int32")
    assert states["conv_0_0"] == ((4, 3, 96), "bfloat16")
    by_channel, selective = (
        inspect_model(model(kind)).states_of(RecurrentState)[0] for kind in ("by channel", "selective")
    )
    assert by_channel.width == 4 * (16 + 16 + 16 + 1)
    assert (selective.heads, selective.key_dim, selective.value_dim) == (1, 8, 128)
    alone = inspect_model(model("state space")).states
    assert [(type(state), state.layer_idx) for state in alone if not isinstance(state, ConvolutionState)] == [
        (RecurrentState, 0),
        (RecurrentState, 1),
    ]


class _Noted:
    """A step that keeps the call of its scan."""

    def scan(self, kind: str, call: ScanCall) -> Tensor:
        self.call = call
        return torch.zeros_like(call.value)


def test_limits_of_a_time_step_are_not_rounded_to_the_type_of_the_model() -> None:
    limits, noted = (0.001, 0.1), _Noted()
    assert all(float(torch.tensor(each, dtype=torch.bfloat16)) != each for each in limits)
    steps = torch.tensor([-20.0, 20.0], dtype=torch.bfloat16).view(1, 2, 1)
    one = torch.ones(1, 2, 1, 4, dtype=torch.bfloat16)
    scan: Any = recurrent_functions._OURS["mamba2_chunk_scan"]
    scan(noted, one, steps, -torch.ones(1), one, one, dt_softplus=True, dt_limit=limits)
    expected = torch.tensor(limits)
    assert torch.equal(-noted.call.decay.flatten(), expected)
    assert torch.equal(noted.call.value[:, 0], expected[:, None].expand(2, 4))


def test_a_recurrence_that_is_computed_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only behind a block: the first comparison sees none of it."""
    compared = parity._measure_difference
    calls = []

    def note(*args: Any) -> tuple[float, float]:
        calls.append(compared(*args))
        return calls[-1]

    monkeypatch.setattr(parity, "_measure_difference", note)
    inspect_model(model("gated delta"))
    assert len(calls) == 2 and all(difference <= tolerance for difference, tolerance in calls)
    scan = comparison_runs.EAGER_OPS.delta_rule

    def forgets(call: Any, rows: Any, state: Any) -> Tensor:
        if state.tail.shape[1] == 64:
            rows.scanned.fill_(-5)
            state.current.zero_()
        return scan(call, rows, state)

    monkeypatch.setattr(comparison_runs, "EAGER_OPS", replace(comparison_runs.EAGER_OPS, delta_rule=forgets))
    with pytest.raises(ValueError, match="it computes a recurrence otherwise over 66 tokens in chunks than at once"):
        inspect_model(model("gated delta"))


def test_states_of_code_of_a_models_own_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = model("gated delta")
    mixer = type(made.model.layers[0].linear_attn)
    assert CacheNeeds.read_code(made).convolves
    forward = mixer.forward

    def other(self: Any, *args: Any, cache_params: Any = None, **kwargs: Any) -> Any:
        output = forward(self, *args, cache_params=cache_params, **kwargs)
        if cache_params is not None:
            cache_params.update_recurrent_state(output, self.layer_idx)
        return output

    monkeypatch.setattr(mixer, "forward", other)
    with pytest.raises(ValueError, match="layer 0 keeps the state of a recurrence of its own"):
        inspect_model(made)
