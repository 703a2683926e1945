# SPDX-License-Identifier: Apache-2.0
"""The cpu target's graphs of all kinds and sizes give a token the same bits."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    Opener,
    as_tensor,
    decode_rows,
    decode_tokens,
    prefill_pieces,
    random_tokens,
    read_states,
    same_states,
)
from torch import Tensor

from optimum_neuron.core import PromptPiece
from optimum_neuron.step.model_spec import ModelSpec


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_a_token_is_the_same_to_the_bit_in_graphs_of_all_kinds(
    open_runner: Opener, tiny_specs: dict[str, ModelSpec], name: str
) -> None:
    runner, prompt = open_runner(name, "cpu"), random_tokens(30)
    others = [PromptPiece(2, random_tokens(11, seed=2))]
    start, token = 13, int(prompt[13])

    def decode() -> Tensor:
        return decode_tokens(runner, {0: token})[1][0]

    def chunk() -> Tensor:
        return prefill_pieces(runner, 0, prompt[start : start + 1], [1])

    def decode_beside_a_chunk() -> Tensor:
        logits = runner.run_step(others, decode_rows(runner, {0: token})).decode_logits
        assert logits is not None
        return as_tensor(logits[0])

    def chunk_beside_decoding() -> Tensor:
        prefill_pieces(runner, 1, prompt[5:9], [4])
        logits = runner.run_step([PromptPiece(0, prompt[start : start + 1])], decode_rows(runner, {1: 7})).chunk_logits
        assert logits is not None
        return as_tensor(logits[0])

    results = []
    for way in (decode, chunk, decode_beside_a_chunk, chunk_beside_decoding):
        runner.reset_slots()
        runner.graph_calls.clear()
        prefill_pieces(runner, 0, prompt[:start], [8, 5])
        results.append((way(), read_states(runner, tiny_specs[name]), set(runner.graph_calls)))
    assert len(set.union(*(graphs for *_, graphs in results))) == 3
    for logits, states, _ in results[1:]:
        assert torch.equal(logits, results[0][0])
        assert same_states(states, results[0][1], [0], stop=start + 1)
