# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of prompts: whole, once, and of nobody else, however vLLM cuts, preempts and mixes its requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llm_answers import ask_each, graph_runner, random_prompt
from scheduler_outputs import GREEDY, Driver
from scheduler_outputs import random_prompt as short_prompt
from slot_model import answer, next_logits
from vllm import LLM, SamplingParams
from vllm.config import VllmConfig

from optimum_neuron.config import NeuronConfig
from optimum_neuron.vllm.host_sampler import PromptScores
from optimum_neuron.vllm.sampling import check_request


# Sums in float32 are rounded in another order than transformers'.
NOISE = 1e-5
SCORED = GREEDY | {"prompt_logprobs": 2}


def check_table(table: Any, prompt: Sequence[int], count: int = 2) -> None:
    """A row for each token but the first: its own, then the most likely ones, with the number of those at least as likely."""
    assert table.logprobs.shape == (len(prompt) - 1, count + 1)
    for place in range(len(prompt) - 1):
        expected = next_logits(np.asarray(prompt[: place + 1])).log_softmax(-1)
        best = expected.topk(count)
        own = expected[prompt[place + 1]]
        assert table.logprob_token_ids[place].tolist() == [prompt[place + 1], *best.indices.tolist()]
        torch.testing.assert_close(table.logprobs[place], torch.cat([own[None], best.values]))
        assert int(table.selected_token_ranks[place]) == int((expected >= own).sum())


def test_chunks_of_one_prompt_fill_one_table_beside_others_that_are_not_scored(vllm_config: VllmConfig) -> None:
    prompts = {"a": short_prompt(19, 1), "b": short_prompt(5, 2), "c": short_prompt(9, 3)}
    driver = Driver(vllm_config, prompts, prompt_logits=True)
    driver.params["a"] = SCORED
    assert driver.step({"a": 8, "b": 5}, {"a": 0, "b": 1}) == ["chunked_prefill | 1:0+5", "scoring | 0:0+8"]
    assert driver.step({"b": 1, "a": 10}) == ["token_generation 1", "scoring | 0:8+8", "scoring | 0:16+2"]
    assert not driver.prompt_tables
    # The last token's logits tell of no token of the prompt.
    assert driver.step({"b": 1, "a": 1, "c": 4}, {"c": 2}) == ["mixed 1 | 0:18+1", "chunked_prefill | 2:0+4"]
    assert driver.prompt_tables.keys() == {"a"}
    check_table(driver.prompt_tables["a"], prompts["a"])
    assert driver.step({"a": 1, "b": 1, "c": 5}) == ["mixed 0,1 | 2:4+5"]
    assert driver.tokens == {"a": answer(prompts["a"], 2), "b": answer(prompts["b"], 4), "c": answer(prompts["c"], 1)}


@pytest.mark.parametrize("taken", [8, 11], ids=["within its prompt", "behind it"])
@pytest.mark.parametrize("version", [1, 2])
def test_a_preempted_request_has_its_table_once(vllm_config: VllmConfig, taken: int, version: int) -> None:
    prompts = {"a": short_prompt(11, 1), "b": short_prompt(3, 2)}
    driver = Driver(vllm_config, prompts, prompt_logits=True)
    driver.params["a"] = SCORED
    driver.step({"a": taken, "b": 3}, {"a": 0, "b": 1})
    driver.step({"b": 1})
    rebuilt = driver.step({"b": 1, "a": 8}, resume={"a": 2}, version=version)
    assert rebuilt == (["token_generation 1", "scoring | 2:0+8"] if taken == 8 else ["mixed 1 | 2:0+8"])
    driver.step({"b": 1, "a": 3 + len(driver.tokens["a"])})
    check_table(driver.prompt_tables["a"], prompts["a"])
    assert driver.tokens["a"] == answer(prompts["a"], len(driver.tokens["a"]))
    assert driver.tokens["b"] == answer(prompts["b"], 4)


def test_a_prompt_of_one_token_has_an_empty_table(vllm_config: VllmConfig) -> None:
    driver = Driver(vllm_config, {"a": [7]}, prompt_logits=True)
    driver.params["a"] = SCORED
    assert driver.step({"a": 1}, {"a": 0}) == ["chunked_prefill | 0:0+1"]
    check_table(driver.prompt_tables["a"], [7])


@pytest.mark.parametrize(("mode", "is_raw"), [("raw_logits", True), ("processed_logprobs", False)])
def test_a_table_has_what_vllm_calls_its_mode(mode: str, is_raw: bool) -> None:
    logits = torch.randn(3, 6)
    scores = PromptScores([1, 2, 5], -1, mode, 6)
    assert scores.last == 2
    scores.add_logits(0, logits)
    expected = (logits if is_raw else logits.log_softmax(-1))[:2]
    assert scores.table.logprobs.shape == (2, 7)
    torch.testing.assert_close(scores.table.logprobs[:, 0], expected[[0, 1], [2, 5]])
    torch.testing.assert_close(scores.table.logprobs[:, 1:], expected.sort(descending=True).values)


def test_artifacts_that_do_not_score_refuse_it_with_the_remedy() -> None:
    params = SamplingParams(prompt_logprobs=1)
    check_request(params, NeuronConfig(prompt_logits=True))
    with pytest.raises(
        ValueError, match=r"no graph of this artifact returns them; export it with --prompt-logits, or leave"
    ):
        check_request(params, NeuronConfig())


def test_prompts_are_scored_as_transformers_scores_them(
    text_model: Any, export_text: Callable[..., Path], open_llm: Callable[..., LLM]
) -> None:
    """Beside requests that want none, and again where the prompt's prefix is in the cache already."""
    llm = open_llm(export_text(prompt_logits=True))
    prompts = [random_prompt(length, 5) for length in (70, 40, 5)]
    asked: list[dict[str, Any]] = [{"prompt_logprobs": 3}, {}, {"prompt_logprobs": 0, "temperature": 1.0, "seed": 1}]
    for _ in range(2):
        outputs = ask_each(llm, prompts, asked, temperature=0, max_tokens=4)
        for output, prompt, each in zip(outputs, prompts, asked, strict=True):
            assert len(output.outputs[0].token_ids) == 4
            if not each:
                assert output.prompt_logprobs is None
                continue
            found = output.prompt_logprobs
            assert found is not None and len(found) == len(prompt) and found[0] is None
            with torch.no_grad():
                expected = text_model(torch.tensor([prompt])).logits[0].log_softmax(-1)
            for place, row in enumerate(found[1:]):
                assert row is not None and prompt[place + 1] in row
                best = expected[place].topk(each["prompt_logprobs"]).indices.tolist()
                assert set(best) | {prompt[place + 1]} == set(row)
                assert all(abs(row[token].logprob - float(expected[place, token])) < NOISE for token in row)
    calls = graph_runner(llm).graph_calls
    assert any(name.startswith("scoring") for name in calls) and any(name.startswith("mixed") for name in calls)
