# SPDX-License-Identifier: Apache-2.0
"""What lm-evaluation-harness's HFLM calls of a model that it is given, without the package: the answers are transformers' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import export_tiny, random_tokens
from torch import Tensor
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from optimum_neuron import NeuronModelForCausalLM


# Sums in float32 are rounded in another order than transformers'.
NOISE = 1e-4


@pytest.fixture(scope="module")
def models(sharp_checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    path = export_tiny(sharp_checkpoints["llama"], tmp_path_factory.mktemp("harness") / "artifact", prompt_logits=True)
    reference = AutoModelForCausalLM.from_pretrained(sharp_checkpoints["llama"], dtype=torch.float32)
    return NeuronModelForCausalLM.from_pretrained(path), reference.eval()


def loglikelihoods(model: Any, requests: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
    """As the harness has them: requests of several lengths padded on the right, without a mask, all logits of the batch at once."""
    texts = [torch.tensor([*context, *wanted][:-1], dtype=torch.long) for context, wanted in requests]
    batch = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True).to(model.device)
    with torch.no_grad():
        logprobs = torch.nn.functional.log_softmax(model(batch).logits, dim=-1)
    found = []
    for row, text, (_, wanted) in zip(logprobs, texts, requests, strict=True):
        own = row[len(text) - len(wanted) : len(text)]
        ids = torch.tensor(wanted)
        found.append((float(own.gather(1, ids[:, None]).sum()), bool((own.argmax(-1) == ids).all())))
    return found


def test_loglikelihoods_of_answers_are_those_of_transformers(models: tuple[Any, Any]) -> None:
    ids = random_tokens(60).tolist()
    requests = [(ids[:20], ids[20:23]), (ids[:3], ids[3:4]), (ids[30:31], ids[31:60])]
    ours, expected = (loglikelihoods(model, requests) for model in models)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in expected]
    assert [value for value, _ in ours] == pytest.approx([value for value, _ in expected], abs=NOISE)


def test_it_is_asked_what_it_is(models: tuple[Any, Any]) -> None:
    model, reference = models
    assert model.eval() is model and model.device == torch.device("cpu") and model.dtype == torch.float32
    assert model.config.model_type == reference.config.model_type
    assert model.num_parameters() == reference.num_parameters()
    assert not isinstance(model, torch.nn.Module) and not hasattr(
        model, "tie_weights"
    )  # else its weights would be tied


class _After(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= 14)


def test_it_generates_with_the_arguments_of_the_harness(models: tuple[Any, Any]) -> None:
    ids = torch.from_numpy(random_tokens(20)).long().view(2, 10)
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_length": 18, "use_cache": True}
    options |= {"pad_token_id": 0, "do_sample": False, "stopping_criteria": StoppingCriteriaList([_After()])}
    ours, expected = (model.generate(input_ids=ids, **options) for model in models)
    assert torch.equal(ours, expected) and ours.shape == (2, 14)
