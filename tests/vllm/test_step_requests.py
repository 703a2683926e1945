# SPDX-License-Identifier: Apache-2.0
"""What becomes of requests between steps: preempted and rebuilt, continued from another slot, sampled here or there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scheduler_outputs import GREEDY, Driver, new_request, random_prompt, step_output
from slot_model import answer, next_logits, uniforms
from vllm.config import VllmConfig

from optimum_neuron.step.spec import SamplingParams


SEEDED = {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "seed": 7}
HOST = GREEDY | {"logprobs": 0}
NEGATIVE = SEEDED | {"seed": -3}  # vLLM allows it, NumPy does not


def undisturbed(prompt: list[int], count: int, params: dict[str, Any]) -> list[int]:
    if params.get("temperature") == 0:
        return answer(prompt, count)
    sampling = SamplingParams(params["top_k"], params["top_p"], params["temperature"])
    return answer(prompt, count, sampling, uniforms(params["seed"] % 2**64, count))


@pytest.mark.parametrize(
    ("params", "slot", "version"), [(GREEDY, 0, 1), (SEEDED, 2, 1), (SEEDED, 0, 2), (HOST, 2, 2), (NEGATIVE, 2, 2)]
)
def test_a_preempted_request_rebuilds_its_prompt_and_its_tokens_and_goes_on(
    vllm_config: VllmConfig, version: int, slot: int, params: dict[str, Any]
) -> None:
    prompts = {"a": random_prompt(11, 1), "b": random_prompt(3, 2)}
    driver = Driver(vllm_config, prompts)
    driver.params["a"] = params
    driver.step({"a": 11, "b": 3}, {"a": 0, "b": 1})
    driver.step({"a": 1, "b": 1})
    driver.step({"a": 1, "b": 1})
    assert driver.step({"b": 1}) == ["token_generation 1"]
    # 11 prompt tokens and 3 generated ones, of which the last is not computed yet either
    assert driver.step({"b": 1, "a": 8}, resume={"a": slot}, version=version) == [f"mixed 1 | {slot}:0+8"]
    assert len(driver.tokens["a"]) == 3
    assert driver.step({"b": 1, "a": 6}) == [f"mixed 1 | {slot}:8+6"]
    driver.step({"a": 1, "b": 1})
    driver.step({"a": 1, "b": 1})
    assert driver.tokens["a"] == undisturbed(prompts["a"], 6, params)
    assert driver.tokens["b"] == answer(prompts["b"], 8)


def test_what_vllms_processors_remember_of_dropped_tokens_is_forgotten(vllm_config: VllmConfig) -> None:
    """Once a request has its min_tokens, vLLM's processor looks at it no more; here it falls below them again."""
    prompt = random_prompt(5, 1)
    first, second, stop = answer(prompt, 3)
    third = int(next_logits(np.asarray([*prompt, first, second])).index_fill(0, torch.tensor([stop]), -1e9).argmax())
    driver = Driver(vllm_config, {"a": prompt})
    driver.params["a"] = GREEDY | {"min_tokens": 3, "stop_token_ids": [stop]}
    driver.step({"a": 5}, {"a": 0})
    for _ in range(3):
        driver.step({"a": 1})
    assert driver.tokens["a"][:3] == [first, second, third]
    del driver.tokens["a"][2:]
    driver.step({"a": 7}, resume={"a": 0})
    assert driver.tokens["a"] == [first, second, third]


@pytest.mark.parametrize("version", [1, 2])
def test_copies_are_made_in_the_order_of_vllms_decisions(vllm_config: VllmConfig, version: int) -> None:
    """vLLM lists new requests before resumed ones. Here the resumed one comes first, and its copy is copied on."""
    shared = random_prompt(20, 1)
    prompts = {"old": shared + random_prompt(4, 2), "new": shared + random_prompt(6, 3), "x": random_prompt(30, 4)}
    driver = Driver(vllm_config, prompts)
    driver.step({"old": 24}, {"old": 0})
    driver.step({"x": 30}, {"x": 1})
    # old comes back to x's slot; then new copies from there, and takes the slot that old's copy came from
    runs = driver.step(
        {"old": 4, "new": 6},
        start={"new": 0},
        resume={"old": 1},
        finished=("x",),
        reuse={"old": (0, 21), "new": (1, 20)},
        version=version,
    )
    assert runs == ["chunked_prefill | 1:21+4", "chunked_prefill | 0:20+6"]
    driver.step({"old": 1, "new": 1})
    assert driver.tokens["old"] == answer(prompts["old"], 3)
    assert driver.tokens["new"] == answer(prompts["new"], 2)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (step_output({"a": 1}, computed={"a": 5}), "row 0 of request a holds 6 tokens, and vLLM counts 5"),
        (step_output({"a": 1}, computed={"a": 7}), "row 0 of request a holds 6 tokens, and vLLM counts 7"),
        (
            step_output({"b": 2}, new=[new_request("b", [5, 6, 7], 1, 1)]),
            "row 1 of request b holds 0 tokens, and vLLM",
        ),
        (
            step_output({"b": 2}, new=[new_request("b", [5, 6, 7], 0, 1)]),
            "row 0 of request b holds 0 tokens, and vLLM",
        ),
        (step_output({"a": 2}, computed={"a": 6}), "schedules 2 tokens of request a, which has 1 to compute"),
        (step_output({"b": 4}, new=[new_request("b", [5, 6, 7], 1)]), "schedules 4 tokens of request b, which has 3"),
    ],
    ids=["fewer computed", "more computed", "new and computed", "another's rows", "two decodes", "beyond the prompt"],
)
def test_books_that_differ_are_a_loud_error(vllm_config: VllmConfig, step: Any, message: str) -> None:
    driver = Driver(vllm_config, {"a": random_prompt(6, 1)})
    driver.step({"a": 6}, {"a": 0})
    with pytest.raises(RuntimeError, match=message):
        driver.runner.execute_step(step)


def test_requests_without_a_seed_draw_from_the_engines(vllm_config: VllmConfig) -> None:
    def tokens(seed: int) -> list[int]:
        vllm_config.model_config.seed = seed
        driver = Driver(vllm_config, {"a": random_prompt(3, 1), "b": random_prompt(3, 1)})
        driver.params = {name: {"temperature": 1.0, "top_k": 200} for name in "ab"}
        driver.step({"a": 3, "b": 3}, {"a": 0, "b": 1})
        for _ in range(4):
            driver.step({"a": 1, "b": 1})
        assert driver.tokens["a"] != driver.tokens["b"]
        return driver.tokens["a"]

    before = vllm_config.model_config.seed
    try:
        assert tokens(1) == tokens(1) != tokens(2)
    finally:
        vllm_config.model_config.seed = before
