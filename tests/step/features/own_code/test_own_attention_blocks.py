# SPDX-License-Identifier: Apache-2.0
"""Models that attend by code of their own have blocks too: rows may share one, and where blocks attend in place they are refused."""

from __future__ import annotations

import logging

import pytest
import torch
from feature_models import FEATURES
from helpers import as_tensor, decode_rows, eager_runner, prefill_pieces, random_tokens, tiny_config

from optimum_neuron.parity.inspect import check_states, inspect_model
from optimum_neuron.step.cache_needs import CacheNeeds


BLOCKS = {
    "sequence_length": 256, "context_buckets": (256,), "prefill_chunk_size": 32, "kv_block_size": 64, "kv_cache_tokens": 512,
}  # fmt: skip


def test_a_block_of_two_rows_serves_both_where_a_model_attends_by_itself() -> None:
    model, prompt = FEATURES["codegen"].model(), 3 + random_tokens(122) % 250
    runner = eager_runner(model, tiny_config(**BLOCKS))
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


def test_blocks_are_gathered_with_a_warning_and_refused_where_they_would_attend_in_place(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = FEATURES["codegen"].model()
    assert CacheNeeds.read_code(model).by_itself
    spec = inspect_model(model)
    with caplog.at_level(logging.WARNING):
        check_states(model, spec, tiny_config(**BLOCKS, target="cpu"))
    assert "layers of CodeGenForCausalLM gather their blocks in each step" in caplog.text
    words = "CodeGenForCausalLM attends by code of its own, .*target='hlo' .*leave out kv_block_size=64"
    with pytest.raises(ValueError, match=words):
        check_states(model, spec, tiny_config(**BLOCKS, target="hlo"))
