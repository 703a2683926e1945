# SPDX-License-Identifier: Apache-2.0
"""Keys and values as codes: exact to what the rule of codes says, and of each token and head alone, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from coded_reference import KINDS, reference, rounded
from helpers import ARCHITECTURES, CHUNK_SIZE, LENGTH, Opener, generate, random_tokens, tiny_config

from optimum_neuron.step.attention.coded_states import round_states
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


def test_a_token_takes_half_the_bytes_and_four_for_each_scale(tiny_specs: dict[str, ModelSpec]) -> None:
    plain, coded = (
        StateSizes.measure(state_specs(tiny_config(dtype="bfloat16", kv_cache_dtype=kind), tiny_specs["llama"]))
        for kind in (None, "int8")
    )
    heads = 2 * 2 * 2  # layers, keys and values, heads
    assert plain.per_token == heads * 16 * 2 and coded.per_token == heads * (16 + 4)
    states = state_specs(tiny_config(dtype="bfloat16", kv_cache_dtype="fp8"), tiny_specs["llama"])
    assert byte_count(states) == 4 * LENGTH * coded.per_token
