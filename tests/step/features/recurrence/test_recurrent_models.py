# SPDX-License-Identifier: Apache-2.0
"""Models with recurrences as step graphs: what they keep, against transformers over prompts longer than a block, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    as_tensor,
    decode_rows,
    decode_tokens,
    eager_runner,
    examples,
    export_tiny,
    prefill_pieces,
    random_tokens,
    tiny_config,
)
from hypothesis import given
from hypothesis import strategies as st
from recurrent import CONFIGS, model
from torch import Tensor
from transformers import AutoModelForCausalLM

from optimum_neuron import NeuronModelForCausalLM
from optimum_neuron.config import NeuronConfig
from optimum_neuron.core import PromptPiece
from optimum_neuron.parity import comparison_runs, parity
from optimum_neuron.parity.inspect import inspect_model
from optimum_neuron.runtime.runner import GraphRunner
from optimum_neuron.step.attention.state import KeyValueState
from optimum_neuron.step.cache_needs import CacheNeeds
from optimum_neuron.step.features.convolution.state import ConvolutionState
from optimum_neuron.step.features.experts.experts import set_experts
from optimum_neuron.step.features.recurrence import recurrent_functions
from optimum_neuron.step.features.recurrence.recurrence import ScanCall
from optimum_neuron.step.features.recurrence.state import RecurrentState
from optimum_neuron.step.model_spec import ModelSpec
from optimum_neuron.step.state_specs import state_specs


# Chunks that hold more than a block, and a prompt that does.
LONG: dict[str, Any] = {"prefill_chunk_size": 96, "sequence_length": 256, "context_buckets": (256,)}
LENGTH: dict[str, Any] = {"sequence_length": 128, "context_buckets": (128,)}
PROMPT = 121


@cache
def spec_of(kind: str) -> ModelSpec:
    return inspect_model(model(kind))


@cache
def runner(kind: str, **changes: Any) -> GraphRunner:
    return eager_runner(model(kind), tiny_config(**changes), spec=spec_of(kind))


@cache
def reference(kind: str) -> Any:
    own = AutoModelForCausalLM.from_config(CONFIGS[kind](), attn_implementation="eager").eval()
    own.load_state_dict(model(kind).state_dict())
    set_experts(own, "eager")
    return own


def own_logits(kind: str, tokens: Any, dtype: torch.dtype) -> Tensor:
    own = reference(kind).to(dtype)
    with torch.inference_mode():
        logits: Tensor = own(input_ids=torch.as_tensor(tokens)[None].long(), use_cache=False).logits[0]
    return logits.double()


@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_are_transformers_behind_prompts_longer_than_a_block(kind: str) -> None:
    text = random_tokens(PROMPT + 5, seed=1)
    text[60:110] = text[60]  # one token repeated
    steps = runner(kind, **LONG)
    steps.reset_slots()
    found = [prefill_pieces(steps, 1, text[:PROMPT], [50, 71])]
    found += [decode_tokens(steps, {1: int(token)})[1][1] for token in text[PROMPT:]]
    exact, expected = (own_logits(kind, text, dtype)[PROMPT - 1 :] for dtype in (torch.float64, torch.float32))
    noise = float((expected - exact).abs().max())
    assert float((torch.stack(found) - exact).abs().max()) <= 3 * noise + 1e-6
    assert float(exact.std()) > 100 * noise


@pytest.mark.parametrize(
    "kind",
    [kind if kind in ("gated delta", "vectors") else pytest.param(kind, marks=pytest.mark.full) for kind in CONFIGS],
)
def test_no_cut_or_neighbor_changes_a_bit_in_chunks_of_any_size(kind: str) -> None:
    text, other = random_tokens(21, seed=2), random_tokens(60, seed=3)

    @examples(20)
    @given(st.integers(2, 17), st.data())
    def check(size: int, data: st.DataObject) -> None:
        steps = runner(kind, prefill_chunk_size=size, ctx_batch_size=2)
        steps.reset_slots()
        whole = [size] * (len(text) // size)
        expected = prefill_pieces(steps, 1, text, [*whole, len(text) - sum(whole)][: -(-len(text) // size)])
        after = decode_tokens(steps, {1: 7})[1][1].clone()
        steps.reset_slots()
        slot, neighbor = data.draw(st.permutations(range(3)))[:2]
        steps.run_step([PromptPiece(neighbor, other[: min(5, size)])])
        done, at, logits = 0, 5, torch.empty(0)
        while done < len(text):
            count = min(data.draw(st.integers(1, size)), len(text) - done)
            chunks = [PromptPiece(slot, text[done : done + count])]
            if data.draw(st.booleans()):
                output = steps.run_step(chunks, decode_rows(steps, {neighbor: int(other[at])}))
            else:
                output = steps.run_step([*chunks, PromptPiece(neighbor, other[at : at + 1])])
            assert output.chunk_logits is not None
            logits, done, at = as_tensor(output.chunk_logits[0]), done + count, at + 1
        assert torch.equal(decode_tokens(steps, {slot: 7})[1][slot], after)
        assert torch.equal(logits, expected)

    check()


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


def test_outside_of_steps_transformers_computes_with_its_own_functions() -> None:
    own = reference("gated delta").float()
    text = random_tokens(9)
    before = own_logits("gated delta", text, torch.float32)
    inspect_model(model("gated delta"))
    assert torch.equal(own_logits("gated delta", text, torch.float32), before)
    output = own.generate(torch.as_tensor(text)[None].long(), max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert output.shape[1] == 12


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


@pytest.mark.parametrize("blocks", [False, True], ids=["slots", "blocks"])
def test_generated_texts_are_those_of_transformers(tmp_path: Path, blocks: bool) -> None:
    """Left padding, requests that start alike, and rows that are preempted and computed again."""
    kind = "gated delta"
    model(kind).save_pretrained(tmp_path / "checkpoint")
    sizes: dict[str, Any] = {"kv_block_size": 64, "kv_cache_tokens": 192} | LENGTH if blocks else {}
    made = NeuronModelForCausalLM.from_pretrained(export_tiny(tmp_path / "checkpoint", tmp_path / "out", **sizes))
    own = reference(kind).float()
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    shared = random_tokens(25, seed=7).tolist()
    prompts = [shared + random_tokens(count, seed=count).tolist() for count in (1, 9, 2, 6)]
    new = 45 if blocks else 8
    expected = [
        own.generate(torch.tensor([prompt]), max_new_tokens=new, **options)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    made.generation_config.eos_token_id = None
    outputs = made.generate_batch(prompts, max_new_tokens=new).values()
    assert [output.generated_tokens for output in outputs] == expected
    longest = max(map(len, prompts))
    # Rows of a batch are never preempted, and the cache of blocks has room for one.
    rows = 1 if blocks else 3
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts[:rows]])
    found = made.generate(ids, attention_mask=(ids > 0).long(), max_new_tokens=new, **options)
    assert found[:, longest:].tolist() == expected[:rows]
