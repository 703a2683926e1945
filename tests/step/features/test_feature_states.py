# SPDX-License-Identifier: Apache-2.0
"""Models with each feature of layers: what they keep, what their layers do not take, and what is found to be computed otherwise."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from feature_models import FEATURES, spec_of
from helpers import as_tensor, decode_rows, eager_runner, prefill_pieces, random_tokens, tiny_config
from torch import Tensor

from optimum_neuron.parity import comparison_runs
from optimum_neuron.parity.inspect import check_states, inspect_model
from optimum_neuron.step.attention import rows as attention_rows
from optimum_neuron.step.attention.state import KeyValueState
from optimum_neuron.step.cache_needs import CacheNeeds
from optimum_neuron.step.features.compressed_keys.state import CompressedKeyState
from optimum_neuron.step.features.convolution.state import ConvolutionState
from optimum_neuron.step.features.recurrence.state import RecurrentState
from optimum_neuron.step.features.selected_keys import slot_index
from optimum_neuron.step.layer_state import LayerState
from optimum_neuron.step.state_specs import state_specs


KEPT: dict[str, tuple[LayerState, ...]] = {
    "lfm2": (KeyValueState(2, 2, 16, 16), *(ConvolutionState(layer, 0, 3, 64) for layer in (0, 1, 3))),
    "gated delta": (
        KeyValueState(1, 2, 16, 16), ConvolutionState(0, 0, 3, 96), RecurrentState(0, 0, 4, 16, 8, 4 * (16 + 8 + 1 + 1)),
    ),
    "by channel": (RecurrentState(0, 0, 4, 16, 16, 4 * (16 + 16 + 16 + 1)),),
    "selective": (RecurrentState(0, 0, 1, 8, 128, 8 + 2 * 128),),
    "deepseek_v4": (
        CompressedKeyState(1, 0, rate=4, spans=2, width=64, key_dim=16),
        CompressedKeyState(1, 1, rate=4, spans=2, width=64, key_dim=16),
        CompressedKeyState(2, 0, rate=8, spans=1, width=32, key_dim=16),
    ),
}  # fmt: skip
# Of compressed keys three slots; behind them as many rows as 23 tokens of a step fill, and the keys of 3 + 2 * 3 and 3 + 2 * 2 groups.
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gated delta": (
        {"prefill_chunk_size": 24, "dtype": "bfloat16"},
        {
            "state_0_0": ((4, 4, 16, 8), "float32"), "anchor_0_0": ((4, 4, 16, 8), "float32"),
            "tail_0_0": ((4, 16, 104), "float32"), "scanned": ((4,), "int32"), "conv_0_0": ((4, 3, 96), "bfloat16"),
        },
    ),
    "deepseek_v4": (
        {"prefill_chunk_size": 10, "sequence_length": 32, "context_buckets": None},
        {
            "buffer_1_0": ((3 + 3, 1, 8, 64), "float32"), "buffer_2_0": ((3 + 3, 1, 8, 32), "float32"),
            "group_1_1": ((3 + 2, 1, 8, 16), "float32"), "group_2_0": ((3 + 2, 1, 4, 16), "float32"),
        },
    ),
}  # fmt: skip
BLOCKS: dict[str, Any] = {
    "sequence_length": 256, "context_buckets": (256,), "prefill_chunk_size": 32, "kv_block_size": 64, "kv_cache_tokens": 512,
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_what_a_model_keeps_is_found_by_running_it(name: str) -> None:
    spec = spec_of(name)
    for kind in {type(state) for state in KEPT[name]}:
        assert spec.states_of(kind) == tuple(state for state in KEPT[name] if isinstance(state, kind))


@pytest.mark.parametrize("name", SHAPES)
def test_states_have_the_sizes_of_a_config(name: str) -> None:
    sizes, expected = SHAPES[name]
    states = {each.name.removeprefix("kv_cache."): each for each in state_specs(tiny_config(**sizes), spec_of(name))}
    assert {each: (states[each].shape, states[each].dtype) for each in expected} == expected


def test_a_slot_that_is_shorter_than_a_group_keeps_none_of_its_keys() -> None:
    config = tiny_config(prefill_chunk_size=2, ctx_batch_size=1, sequence_length=7, context_buckets=None)
    assert not [state.name for state in state_specs(config, spec_of("deepseek_v4")) if "_2_" in state.name]


@pytest.mark.parametrize(
    ("name", "option", "words"),
    [
        ("deepseek_v32", "kv_block_size=64", "2 layers of DeepseekV32ForCausalLM select 8 keys of up to sequence_length=256, and on"),
        ("deepseek_v4", "kv_block_size=64", "2 layers of DeepseekV4ForCausalLM keep compressed keys, "),
        ("codegen", "kv_block_size=64", "CodeGenForCausalLM attends by code of its own, .*target='hlo' "),
        ("state space", "kv_cache_dtype='int8'", "Mamba2ForCausalLM keeps none: states of recurrences"),
        ("gptj", "kv_cache_dtype='int8'", "GPTJForCausalLM attends by code of its own"),
        ("deepseek_v4", "kv_cache_dtype='int8'", "2 layers of DeepseekV4ForCausalLM attend to compressed keys"),
    ],
)  # fmt: skip
def test_what_layers_do_not_take_is_refused_by_name(
    name: str, option: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, blocks = FEATURES[name].model(), BLOCKS | {"output_logits": False}
    refused: dict[str, Any] = blocks | {"target": "hlo"} if "block" in option else {"kv_cache_dtype": "int8"}
    with pytest.raises(ValueError, match=words) as caught:
        check_states(model, spec_of(name), tiny_config(**refused))
    assert option in str(caught.value) and "leave" in str(caught.value)
    with caplog.at_level(logging.WARNING):
        check_states(model, spec_of(name), tiny_config(**blocks | {"target": "cpu"} if "block" in option else {}))
    assert ("layers of CodeGenForCausalLM gather their blocks in each step" in caplog.text) == (name == "codegen")


def test_a_block_of_two_rows_serves_both_where_a_model_attends_by_itself() -> None:
    prompt = 3 + random_tokens(122) % 250
    runner = eager_runner(FEATURES["codegen"].model(), tiny_config(**BLOCKS), spec=spec_of("codegen"))
    runner.assign_blocks(1, 0, (4, 6, 1))
    runner.assign_blocks(2, 0, (4, 5))
    prefill_pieces(runner, 1, prompt, [32, 32, 32, 26])
    runner.resume_slot(2, 64)
    prefill_pieces(runner, 2, prompt[64:], [58])
    for index in range(10):
        if index == 6:
            runner.assign_blocks(2, 2, (3,))
        output = runner.run_step([], decode_rows(runner, {1: 3 + index, 2: 3 + index}))
        assert output.decode_logits is not None
        assert torch.allclose(*map(as_tensor, output.decode_logits[1:3]), atol=1e-5)


def forget_blocks(patch: pytest.MonkeyPatch) -> None:
    """Only behind a block: the first comparison sees none of it."""
    scan = comparison_runs.EAGER_OPS.delta_rule

    def forget(call: Any, rows: Any, state: Any) -> Tensor:
        if state.tail.shape[1] == 64:
            rows.scanned.fill_(-5)
            state.current.zero_()
        return scan(call, rows, state)

    patch.setattr(comparison_runs, "EAGER_OPS", replace(comparison_runs.EAGER_OPS, delta_rule=forget))


def select_the_smallest(patch: pytest.MonkeyPatch) -> None:
    largest = slot_index.select_largest
    patch.setattr(slot_index, "select_largest", lambda scores, *arguments: largest(-scores, *arguments))


def see_groups_late(patch: pytest.MonkeyPatch) -> None:
    """By the prompt of several groups: the short one ends before the first group of eight."""
    visible = attention_rows.visible_groups

    def late(position_ids: Tensor, rate: int, groups: int) -> Tensor:
        return visible(position_ids - (rate if rate == 8 else 0), rate, groups)

    patch.setattr(attention_rows, "visible_groups", late)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("gated delta", forget_blocks, "a recurrence otherwise over 66"),
        ("minimax_m3_vl_text", select_the_smallest, "otherwise over (15|66)"),
        ("qwen4_exp_text", select_the_smallest, "otherwise over (15|66)"),
        ("deepseek_v4", see_groups_late, "compressed keys otherwise over 24"),
    ],
)
def test_what_is_computed_otherwise_in_chunks_is_refused(
    name: str, change: Callable[[pytest.MonkeyPatch], None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch)
    with pytest.raises(ValueError, match=f"{words} tokens in chunks than at once"):
        inspect_model(FEATURES[name].model())


def test_states_of_code_of_a_models_own_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = FEATURES["gated delta"].model()
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
