# SPDX-License-Identifier: Apache-2.0
"""Rows of a ragged batch that end at different steps: tokens, scores and logits are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import export_tiny, random_tokens
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria

from optimum_neuron import NeuronModelForCausalLM


LENGTHS = (4, 9, 6)
NEW_TOKENS = 12


class AfterTokens(StoppingCriteria):
    """Ends row i after a number of tokens of its own."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.tensor([input_ids.shape[1] >= max(LENGTHS) + count for count in (3, 7, 5)])


@pytest.fixture(scope="module")
def pair(sharp_checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder = sharp_checkpoints["llama"]
    path = export_tiny(folder, tmp_path_factory.mktemp("rows") / "artifact")
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return NeuronModelForCausalLM.from_pretrained(path), reference


@pytest.fixture(scope="module")
def batch() -> dict[str, Tensor]:
    ids, mask = torch.zeros((2, len(LENGTHS), max(LENGTHS)), dtype=torch.int64)
    for row, length in enumerate(LENGTHS):
        ids[row, -length:] = torch.from_numpy(random_tokens(length, seed=row))
        mask[row, -length:] = 1
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture(scope="module")
def ends(pair: tuple[Any, Any], batch: dict[str, Tensor]) -> list[int]:
    """End tokens that each row reaches at another step."""
    free = pair[1].generate(**batch, do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=None, pad_token_id=0)
    return [int(free[row, max(LENGTHS) + step]) for row, step in enumerate((2, 6, 9))]


@pytest.mark.parametrize(("criteria", "kept"), [(False, True), (True, False)], ids=["scores", "criteria"])
@pytest.mark.parametrize(
    "options",
    [
        {"eos": True, "pad_token_id": 0}, {"eos": True, "pad_token_id": 77}, {"eos": True},
        {"eos": False, "pad_token_id": 77}, {"eos": False},
        {"eos": True, "pad_token_id": 0, "repetition_penalty": 1.3},
        {"eos": True, "pad_token_id": 0, "forced_eos_token_id": 9},
        {"eos": True, "pad_token_id": 0, "do_sample": True, "top_k": 20, "repetition_penalty": 1.1},
    ],
    ids=str,
)  # fmt: skip
def test_every_row_shows_what_transformers_shows(
    pair: tuple[Any, Any],
    batch: dict[str, Tensor],
    ends: list[int],
    options: dict[str, Any],
    criteria: bool,
    kept: bool,
) -> None:
    given: dict[str, Any] = {"do_sample": False, "pad_token_id": None} | options
    given["eos_token_id"] = ends if given.pop("eos") else None
    given |= {"return_dict_in_generate": True, "output_scores": kept, "output_logits": kept}
    results = []
    for model in pair:
        torch.manual_seed(3)
        own = [AfterTokens()] if criteria else None
        results.append(model.generate(**batch, **given, max_new_tokens=NEW_TOKENS, stopping_criteria=own))
    ours, theirs = results
    assert torch.equal(ours.sequences, theirs.sequences)
    for name in ("scores", "logits") if kept else ():
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=0, atol=1e-4)


def test_rows_that_may_end_need_a_token_to_pad_with(pair: tuple[Any, Any], batch: dict[str, Tensor]) -> None:
    class EndToken(StoppingCriteria):
        eos_token_id = 5

        def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
            return input_ids[:, -1] == self.eos_token_id

    options = {"max_new_tokens": 3, "eos_token_id": None, "pad_token_id": None, "stopping_criteria": [EndToken()]}
    with pytest.raises(ValueError, match="no token to pad them with; set pad_token_id"):
        pair[0].generate(**batch, **options)


@pytest.mark.parametrize("count", [1, 5, None])
def test_a_forced_end_token_is_the_last_of_each_request(pair: tuple[Any, Any], count: int | None) -> None:
    model, prompts = pair[0], [random_tokens(length, seed=length).tolist() for length in (4, 60, 1, 9)]
    config = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=-1, forced_eos_token_id=9)
    outputs = model.generate_batch(prompts, config)
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        asked = model.neuron_config.sequence_length - len(prompt) + 1 if count is None else count
        options = {"max_new_tokens": asked, "do_sample": False, "forced_eos_token_id": 9, "eos_token_id": None}
        assert output.generated_tokens == model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
        assert output.generated_tokens[-1] == 9 and len(output.generated_tokens) == asked


def test_processors_of_a_request_know_its_own_end_tokens(pair: tuple[Any, Any]) -> None:
    model, prompt = pair[0], random_tokens(5).tolist()
    options = {"max_new_tokens": 8, "min_new_tokens": 6, "do_sample": False}
    free = model.generate(torch.tensor([prompt]), **options, eos_token_id=None)[0, 5:].tolist()
    with model.continuous_batching_context_manager(GenerationConfig(**options, eos_token_id=-1)) as manager:
        manager.add_request(prompt, request_id="x", eos_token_id=free[1])
        output = manager.get_result("x", timeout=30)
    expected = model.generate(torch.tensor([prompt]), **options, eos_token_id=free[1])[0, 5:].tolist()
    assert output.generated_tokens == expected and len(expected) >= 6
