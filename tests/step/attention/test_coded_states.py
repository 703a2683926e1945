# SPDX-License-Identifier: Apache-2.0
"""Keys and values as codes: exact to what the rule of codes says, and of each token and head alone, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from architectures.models import graph_model
from coded_reference import KINDS, reference, rounded
from feature_models import FEATURES
from helpers import (
    ARCHITECTURES,
    CHUNK_SIZE,
    LENGTH,
    Opener,
    generate,
    random_tokens,
    tiny_config,
)
from transformers import AutoModelForCausalLM, MambaConfig

from optimum_neuron.parity.inspect import check_states, inspect_model
from optimum_neuron.step.attention.cached_attention import attend_cache
from optimum_neuron.step.attention.coded_states import round_states
from optimum_neuron.step.attention.rows import AttentionCall, AttentionRows
from optimum_neuron.step.interface import ATTENTION_NAME
from optimum_neuron.step.model_spec import ModelSpec
from optimum_neuron.step.state_specs import StateSizes, byte_count, state_specs


TYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_and_scales_stand_for_what_the_rule_says(kind: str, dtype: torch.dtype) -> None:
    states = torch.randn(40, 3, 16, generator=torch.Generator().manual_seed(0)).to(dtype) * torch.logspace(-20, 9, 40)[
        :, None, None
    ].to(dtype)
    states[7, 1] = 0
    coded = round_states(states, TYPES[kind])
    assert coded.codes.dtype == TYPES[kind] and coded.scale.shape == (40, 3, 1)
    assert torch.equal(coded.dequantize(), rounded(states, kind))
    assert (coded.codes[7, 1].float() == 0).all() and coded.scale[7, 1] == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_makes_its_own_head_nan_and_leaves_no_code(kind: str, value: float) -> None:
    states = torch.randn(4, 3, 16)
    whole = round_states(states, TYPES[kind])
    states[2, 1, 5] = value
    coded = round_states(states, TYPES[kind])
    assert coded.dequantize()[2, 1].isnan().all() and (coded.codes[2, 1].float() == 0).all()
    other = torch.ones(4, 3, dtype=torch.bool)
    other[2, 1] = False
    assert torch.equal(coded.dequantize()[other], whole.dequantize()[other])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_steps_equal_transformers_with_rounded_keys_and_values(
    open_runner: Opener, sharp_checkpoints: dict[str, Path], name: str, kind: str
) -> None:
    runner, expected = open_runner(name, kv_cache_dtype=kind), reference(sharp_checkpoints[name], kind)
    plain = open_runner(name)
    for length in (CHUNK_SIZE - 1, 3 * CHUNK_SIZE + 1):
        prompt = random_tokens(length, seed=length)
        tokens, logits = generate(runner, prompt, 12)
        with torch.no_grad():
            found = expected(torch.tensor([*prompt, *tokens[:-1]])[None]).logits[0, length - 1 :]
        # Where a number lies between two codes, the last bit of its float32 decides.
        assert (logits - found).abs().median() < 1e-6 and (logits - found).abs().max() < 2e-4
        first = generate(plain, prompt, 1)[1]
        assert (logits[0] - first[0]).abs().max() > 3e-4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"sliding_window": 5}], ids=["plain", "softcap", "window"])
def test_attention_over_codes_is_attention_over_what_they_stand_for(
    kind: str, dtype: torch.dtype, options: dict
) -> None:
    """Large numbers would leave float16, and unseen columns hold NaN."""
    generator, columns = torch.Generator().manual_seed(1), torch.arange(24)
    keys, values = (torch.randn(3, 2, 24, 16, generator=generator) * 60 for _ in range(2))
    keys[:, :, 20:], values[:, :, 20:] = float("nan"), float("inf")
    query = torch.randn(2, 4, 3, 16, generator=generator).to(dtype)
    positions = torch.tensor([[3, 4, 5], [17, 18, 19]], dtype=torch.int32)
    arguments = {"softcap": None, "sliding_window": None, "sinks": None} | options
    window = options.get("sliding_window", len(columns))
    call = AttentionCall(0, query, query, query, 0.02, **arguments)
    coded = [round_states(each, TYPES[kind]) for each in (keys, values)]
    output = attend_cache(call, AttentionRows(positions, None, 24), query, *coded)
    plain = [torch.nan_to_num(each.dequantize()[:2]).repeat_interleave(2, 1).double() for each in coded]
    scores = query.double() @ plain[0].transpose(-1, -2) * 0.02
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    seen = (columns <= positions[..., None]) & (columns > positions[..., None] - window)
    expected = (scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1) @ plain[1]).transpose(1, 2)
    assert output.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 1e-3
    torch.testing.assert_close(output.double(), expected, atol=60 * tolerance, rtol=tolerance)


def test_who_sees_a_broken_token_gets_nan_and_nobody_else() -> None:
    query = torch.randn(1, 2, 3, 16)
    states = torch.randn(1, 1, 8, 16)
    states[0, 0, 4, 2] = float("nan")
    coded = round_states(states, torch.int8)
    call = AttentionCall(0, query, query, query, 0.25, None, None, None)
    output = attend_cache(
        call, AttentionRows(torch.tensor([[2, 3, 4]], dtype=torch.int32), None, 8), query, coded, coded
    )
    assert output[0, :2].isfinite().all() and output[0, 2].isnan().all()


def test_a_token_takes_half_the_bytes_and_four_for_each_scale(tiny_specs: dict[str, ModelSpec]) -> None:
    plain, coded = (
        StateSizes.measure(state_specs(tiny_config(dtype="bfloat16", kv_cache_dtype=kind), tiny_specs["llama"]))
        for kind in (None, "int8")
    )
    heads = 2 * 2 * 2  # layers, keys and values, heads
    assert plain.per_token == heads * 16 * 2 and coded.per_token == heads * (16 + 4)
    states = state_specs(tiny_config(dtype="bfloat16", kv_cache_dtype="fp8"), tiny_specs["llama"])
    assert byte_count(states) == 4 * LENGTH * coded.per_token


def test_models_whose_caches_have_no_codes_are_refused_by_name() -> None:
    config = tiny_config(kv_cache_dtype="int8")
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "state_size": 4, "vocab_size": 60}
    mamba = AutoModelForCausalLM.from_config(MambaConfig(**sizes), attn_implementation=ATTENTION_NAME)
    refused = {
        "MambaForCausalLM keeps none: states of recurrences": mamba,
        "GPTJForCausalLM attends by code of its own": graph_model("gptj", torch.float32),
        "2 layers of DeepseekV4ForCausalLM attend to compressed keys": FEATURES["deepseek_v4"].model(),
    }
    for words, model in refused.items():
        spec = inspect_model(model, compare=False)
        with pytest.raises(ValueError, match=words) as caught:
            check_states(model, spec, config)
        assert "kv_cache_dtype='int8'" in str(caught.value) and "leave it out" in str(caught.value)
        check_states(model, spec, tiny_config())
