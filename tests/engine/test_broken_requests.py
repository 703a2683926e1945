# SPDX-License-Identifier: Apache-2.0
"""A request whose numbers are not finite: the others get what they get alone, and its slot serves the next one."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from helpers import VOCAB, eager_runner, random_tokens, tiny_config
from torch import nn

from optimum_neuron.core import Request
from optimum_neuron.engine.engine import Engine
from optimum_neuron.runtime.runner import GraphRunner
from optimum_neuron.step.spec import GREEDY, SamplingParams


BROKEN = 77  # the token whose row of the embedding is NaN
SAMPLED = SamplingParams(top_k=40, top_p=0.95, temperature=1.5)


def serve(engine: Engine, requests: list[Request]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add_request(request)
    for event in engine.run_requests():
        tokens[event.request_id].append(event.token_id)
    return tokens


@pytest.fixture(scope="module")
def runner(tiny_models: dict[str, nn.Module]) -> GraphRunner:
    """All steps run in one graph: what a request gets is then the same to the bit, beside others and alone."""
    model: Any = copy.deepcopy(tiny_models["llama"])
    model.get_input_embeddings().weight.data[BROKEN] = torch.nan
    model.lm_head.weight.data[BROKEN] = -model.lm_head.weight.data.abs().mean()  # nobody draws it
    return eager_runner(model, tiny_config(), deterministic=True)


def clean_tokens(count: int, seed: int) -> np.ndarray:
    tokens = random_tokens(count, seed)
    return np.where(tokens == BROKEN, 4, tokens).astype(np.int32)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_broken_request_costs_the_others_nothing(runner: GraphRunner, sampling: SamplingParams) -> None:
    shared = clean_tokens(20, seed=9)
    prompts = [np.concatenate([shared, clean_tokens(5 + number, seed=number)]) for number in range(6)]
    prompts[2][20], prompts[4][9] = BROKEN, BROKEN  # behind the shared beginning, and within it
    requests = [
        Request(request_id=str(number), prompt_token_ids=prompt, max_new_tokens=9, sampling=sampling, seed=number)
        for number, prompt in enumerate(prompts)
    ]
    runner.reset_slots()
    alone = {}
    for request in requests:
        alone |= serve(Engine(runner, vocab_size=VOCAB), [request])
    engine = Engine(runner, vocab_size=VOCAB)
    for _ in range(2):  # the second time, all slots are used ones
        together = serve(engine, requests)
        assert together == alone
    assert all(len(tokens) == 9 and set(tokens) <= set(range(VOCAB)) for tokens in together.values())
    assert together["2"] == together["4"] == [0] * 9  # as the argmax of NaN alone is
    assert len({tuple(tokens) for tokens in together.values()}) == 5
    assert engine.statistics.prefix_hit_tokens > 0
