# SPDX-License-Identifier: Apache-2.0
"""What step graphs would compute wrongly is refused, with the cause; what a layer sees is learned from its mask."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from configs import tiny_config
from parity import sharpen
from tiny import TINY_SIZES
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2_5_VLTextConfig
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    packed_sequence_mask_function,
    sliding_window_causal_mask_function,
)

from optimum_neuron.checkpoints.language_model import register_language_model
from optimum_neuron.errors import UnsupportedModelError
from optimum_neuron.parity import inspect
from optimum_neuron.parity.inspect import inspect_model
from optimum_neuron.step.attention.masks import AttentionChunk, causal_mask
from optimum_neuron.step.attention.rows import AttentionRows
from optimum_neuron.step.interface import ATTENTION_NAME, set_implementation, with_attention
from optimum_neuron.targets.neuron.sharding.trace import data_free_copy, no_data


def tiny_model(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    config = tiny_config(name)
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    sharpen(model)
    set_implementation(model, ATTENTION_NAME)
    return model.to(dtype)


class Mixer(nn.Module):
    """Adds to each token a part of the one before it: a token shift, or a convolution of two."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: Tensor) -> Tensor:
        mixed = hidden_states + nn.functional.pad(hidden_states, (0, 0, 1, -1))
        output: Tensor = self.layer(mixed)
        return output


def text_model_of_qwen2_5_vl() -> PreTrainedModel:
    """A language model that transformers has only inside of another."""
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    config = Qwen2_5_VLTextConfig(**TINY_SIZES, rope_parameters=rope)
    register_language_model(config)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME).eval()
    sharpen(model)
    return model


@pytest.mark.parametrize(
    "make",
    [
        *(partial(tiny_model, "llama", dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
        partial(tiny_model, "deepseek_v3", num_key_value_heads=2),  # transformers' own attention cannot run it
        text_model_of_qwen2_5_vl,
    ],
)
def test_tokens_that_influence_each_other_outside_of_attention_are_found(make: Callable[[], Any]) -> None:
    model = make()
    assert len(inspect_model(model).states) == model.config.num_hidden_layers
    model.model.layers[0].mlp = Mixer(model.model.layers[0].mlp)
    with pytest.raises(ValueError, match="it lets tokens of different requests in a step influence each other"):
        inspect_model(model)


@pytest.mark.parametrize("window", [4, 256])
def test_keys_that_a_table_of_places_hides_are_refused_whatever_the_window(window: int) -> None:
    words = r"hides keys by a table of places in a call, transformer\.h\.0\.attn\.attention\.bias"
    with pytest.raises(ValueError, match=words):
        inspect_model(tiny_model("gpt_neo", window_size=window))


def test_attention_of_a_models_own_is_compared_behind_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect, "check_own_masks", lambda model: None)
    config = tiny_config("gpt_neo")
    config.window_size, config.max_position_embeddings = 32, 1024
    config.attention_layers = ["global", "global", "global", "local"]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()  # attends to all alike
    set_implementation(model.to(torch.bfloat16), ATTENTION_NAME)
    with pytest.raises(ValueError, match="attends by code of its own otherwise over 73 tokens in chunks than at once"):
        inspect_model(model)


def test_a_config_that_no_code_can_run_is_refused_with_what_failed() -> None:
    words = "FalconForCausalLM cannot be exported: it fails on a token .* invalid for input"
    with pytest.raises(ValueError, match=words):
        inspect_model(tiny_model("falcon", multi_query=False))


def test_weights_of_several_types_that_do_not_go_together_are_refused_with_the_type_that_does() -> None:
    """As transformers loads DeepSeek-V4 in bfloat16: norms stay in float32, and linear layers behind them do not take it."""
    model = tiny_model("llama", torch.bfloat16)
    for layer in model.model.layers:
        layer.input_layernorm.float()
    words = "it fails on a prompt .*; its weights have the types bfloat16 and float32: try dtype='float32'"
    with pytest.raises(ValueError, match=words):
        inspect_model(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("cpmant", "attends by code of its own, which adds Tensor"),
        ("inkling_text", "calls attention with position_bias="),
        ("git", "computes with its attention mask"),
        ("rwkv", "0 attention calls were seen for num_hidden_layers=4; its layers attend or keep state in code of"),
        ("doge", "passes a mask or bias of its own to attention"),
    ],
)
def test_a_model_is_refused_by_its_cause(name: str, reason: str, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"cannot be exported: .*{reason}"):
        inspect_model(tiny_model(name, dtype))


def test_a_model_that_numbers_tokens_by_those_of_a_call_or_attends_in_both_directions_is_refused() -> None:
    with pytest.raises(ValueError, match="ignores position_ids and counts the tokens of a call"):
        inspect_model(tiny_model("trocr", use_learned_position_embeddings=False))
    inspect_model(tiny_model("trocr"))  # its table takes positions, though nobody passes it some
    inspect_model(tiny_model("bert"))
    with pytest.raises(ValueError, match="masks attention by bidirectional_mask_function"):
        inspect_model(tiny_model("bert", is_decoder=False))


def test_rounding_refuses_no_model_whose_many_routers_amplify_it() -> None:
    """Near-ties between experts fall otherwise when anything is rounded otherwise: logits of these steps are far off."""
    layers = {"num_hidden_layers": 32, "n_routed_experts": 32, "num_experts_per_tok": 4}
    assert len(inspect_model(tiny_model("deepseek_v3", torch.bfloat16, **layers)).states) == 32


def test_an_inspected_model_keeps_its_attention_and_weights_and_needs_no_data() -> None:
    model = tiny_model("gemma2")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with no_data():
        spec = inspect_model(data_free_copy(model))
    assert spec == inspect_model(model)
    assert model.config._attn_implementation == ATTENTION_NAME
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_mask_of_the_windows_that_transformers_makes_is_a_rule_about_positions() -> None:
    positions = torch.arange(30)
    rows = AttentionRows(positions[None].int(), None, 30)
    left = torch.zeros(1, dtype=torch.int32)
    for function, window in (
        (causal_mask_function, None),
        (sliding_window_causal_mask_function(8), 8),
        (chunked_causal_mask_function(8, left), AttentionChunk(8)),
    ):
        mask = causal_mask(mask_function=function)
        assert mask.visible_window() == window
        zero = torch.tensor(0)
        expected = [[bool(function(zero, zero, query, key)) for key in positions] for query in positions]
        assert torch.equal(rows.visible(window)[0], torch.tensor(expected))
    # An idle row sees nothing of its attention chunk.
    assert not AttentionRows(torch.tensor([[-1]], dtype=torch.int32), None, 30).visible(AttentionChunk(8)).any()


def remap_positions_for_packed_sequence(mask_function: Callable, position_ids: torch.Tensor) -> Callable:
    """What newer versions of transformers wrap around a mask by positions, of rows that they take for packed."""

    def inner_mask(batch: int, head: int, query: int, key: int) -> Any:
        return mask_function(batch, head, position_ids[batch, query], position_ids[batch, key])

    return inner_mask


@pytest.mark.parametrize("remap", [remap_positions_for_packed_sequence, lambda function, _: function])
def test_packed_rows_are_left_to_the_step_and_what_else_a_mask_does_is_seen(remap: Callable) -> None:
    positions = torch.tensor([[0, 1, 0]])
    packed = packed_sequence_mask_function(torch.tensor([[0, 0, 1]]))
    window = remap(sliding_window_causal_mask_function(4), positions)
    assert causal_mask(mask_function=and_masks(packed, window)).visible_window() == 4
    for other in (packed, lambda *_: True, or_masks(causal_mask_function, packed)):
        with pytest.raises(UnsupportedModelError, match="no causal or windowed mask"):
            causal_mask(mask_function=and_masks(packed, remap(other, positions))).visible_window()


def test_a_model_that_computes_with_its_mask_is_stopped_by_name() -> None:
    mask: Any = causal_mask(mask_function=causal_mask_function)
    assert mask[:, :, :, :4] is mask
    scores = torch.zeros(1, 1, 3, 3)
    for compute in (
        lambda: scores + mask, lambda: mask + scores, lambda: scores.masked_fill(mask, 0.0), lambda: torch.cat([mask, scores]),
        lambda: mask.device, lambda: mask < 0, lambda: ~mask, lambda: bool(mask),
    ):  # fmt: skip
        with pytest.raises(UnsupportedModelError, match="it computes with its attention mask"):
            compute()


def test_a_model_that_knows_only_the_names_of_transformers_gets_our_attention_afterwards() -> None:
    make = partial(AutoModelForCausalLM.from_config, tiny_config("gptj"))
    model = with_attention(lambda name: make(attn_implementation=name), ATTENTION_NAME)
    found = {module.config._attn_implementation for module in model.modules() if hasattr(module, "config")}
    assert found == {ATTENTION_NAME}

    def fail(name: str) -> PreTrainedModel:
        raise KeyError("another")

    with pytest.raises(KeyError, match="another"):
        with_attention(fail, ATTENTION_NAME)
