# SPDX-License-Identifier: Apache-2.0
"""Prompts packed one behind another are taken apart, or refused where their bounds do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import VOCAB, export_tiny, random_tokens
from hypothesis import given
from hypothesis import strategies as st

from optimum_neuron import NeuronModelForCausalLM
from optimum_neuron.runtime.prompts import unpack


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_packed_prompts_are_taken_apart(lengths: list[int]) -> None:
    prompts = [random_tokens(length, seed=length) for length in lengths]
    packed = torch.cat([torch.from_numpy(prompt) for prompt in prompts])[None].long()
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    assert [prompt.tolist() for prompt in unpack(packed, bounds, VOCAB)] == [prompt.tolist() for prompt in prompts]


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ([1, 5], r"cu_seqlens=\[1, 5\] must be one row that starts at 0"),
        ([[0, 5]], "must be one row that starts at 0"),
        ([0], "starts at 0 and names each prompt's end"),
        ([0, 3, 3, 5], "must rise"),
        ([0, 4, 3, 5], "must rise"),
        ([0, 4], r"must end with the number of tokens .* \[1, 5\]"),
        ([0, 6], "must end with the number of tokens"),
    ],
)
def test_bounds_that_do_not_fit_are_refused(bounds: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        unpack(torch.arange(5)[None], torch.tensor(bounds), VOCAB)
    with pytest.raises(ValueError, match="must end with"):
        unpack(torch.arange(6).view(2, 3), torch.tensor([0, 6]), VOCAB)


def test_a_model_takes_packed_prompts_as_transformers_names_them(tiny_checkpoint: Path, tmp_path: Path) -> None:
    model = NeuronModelForCausalLM.from_pretrained(export_tiny(tiny_checkpoint, tmp_path / "artifact"))
    prompts = [torch.from_numpy(random_tokens(length)).long()[None] for length in (5, 17, 2)]
    logits = model(torch.cat(prompts, dim=1), cu_seq_lens_q=torch.tensor([0, 5, 22, 24]), logits_to_keep=1).logits
    assert logits.shape[:2] == (3, 1)
    # Two short prompts and a long one share steps, whose rows no two of them share.
    assert sum(model.runner.graph_calls.values()) == 3
    for row, prompt in enumerate(prompts):
        assert torch.equal(logits[row], model(prompt, logits_to_keep=1).logits[0])
    with pytest.raises(ValueError, match="attention_mask has no meaning for packed prompts"):
        model(prompts[0], attention_mask=torch.ones(1, 5), cu_seq_lens_q=torch.tensor([0, 5]))
