# SPDX-License-Identifier: Apache-2.0
"""What the engine tells beside tokens: the most likely ones, and how full each graph's runs were."""

from __future__ import annotations

from collections import Counter

import torch
from helpers import CHUNK_SIZE, SIZES, VOCAB, Opener, generate, random_tokens

from optimum_neuron.core import Request
from optimum_neuron.engine.engine import Engine
from optimum_neuron.engine.events import TokenEvent


def request(name: str, length: int, new_tokens: int, *, logprobs: bool = False) -> Request:
    prompt = random_tokens(length, seed=length)
    return Request(request_id=name, prompt_token_ids=prompt, max_new_tokens=new_tokens, logprobs=logprobs)


def test_who_asks_is_told_the_most_likely_tokens_in_chunks_and_decodes(open_runner: Opener) -> None:
    runner = open_runner("llama", top_logprobs=3)
    wants, other = request("wants", 11, 5, logprobs=True), request("other", 9, 5)
    tokens, logits = generate(runner, wants.prompt_token_ids, 5)
    engine = Engine(runner, vocab_size=VOCAB)
    engine.add_request(wants)
    engine.add_request(other)
    events = [event for event in engine.run_requests() if isinstance(event, TokenEvent)]
    assert all(event.top == () for event in events if event.request_id == "other")
    told = [event for event in events if event.request_id == "wants"]
    assert [event.token_id for event in told] == tokens
    for event, row in zip(told, logits.log_softmax(-1), strict=True):
        best = row.topk(3)
        assert [token for token, _ in event.top] == best.indices.tolist()
        torch.testing.assert_close(torch.tensor([each for _, each in event.top]), best.values, rtol=0, atol=1e-4)


def test_runs_and_padding_are_counted_by_graph(open_runner: Opener) -> None:
    runner = open_runner("llama")
    engine = Engine(runner, vocab_size=VOCAB)
    assert {name: use.runs for name, use in engine.statistics.graphs.items()} == {g.name: 0 for g in runner.family}
    runner.graph_calls.clear()
    for name, length in (("a", CHUNK_SIZE + 3), ("b", 5), ("c", 6), ("d", 7)):
        engine.add_request(request(name, length, 4))
    list(engine.run_requests())
    uses = engine.statistics.graphs
    assert Counter({name: use.runs for name, use in uses.items()}) == runner.graph_calls
    rooms = {graph.name: graph.tokens for graph in runner.family}
    assert all(use.tokens + use.padding == use.runs * rooms[name] for name, use in uses.items())
    assert sum(use.tokens for use in uses.values()) == CHUNK_SIZE + 3 + 5 + 6 + 7 + 4 * 3
    decodes = next(use for name, use in uses.items() if name.startswith("token_generation"))
    assert decodes.padding < decodes.runs * SIZES["batch_size"]
