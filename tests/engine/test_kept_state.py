# SPDX-License-Identifier: Apache-2.0
"""Models whose slots keep state beside keys and values: each request gets what it gets alone, whoever comes, goes or is preempted."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import VOCAB, eager_runner, examples, export_tiny, random_tokens, tiny_config
from hypothesis import given
from hypothesis import strategies as st
from recurrent import SERVED, model
from torch import Tensor
from transformers import AutoModelForCausalLM, LogitsProcessorList

from optimum_neuron import NeuronModelForCausalLM
from optimum_neuron.engine.engine import Engine
from optimum_neuron.engine.policy import SchedulerOptions
from optimum_neuron.engine.request import Request
from optimum_neuron.runtime.runner import GraphRunner


SHARED = random_tokens(40, seed=7)
# Four blocks for three rows that could use three each.
BLOCKS: dict[str, Any] = {
    "sequence_length": 192,
    "context_buckets": (192,),
    "kv_block_size": 64,
    "kv_cache_tokens": 256,
}
KINDS = [pytest.param(kind, marks=[pytest.mark.full] * (kind != "nemotron_h")) for kind in SERVED]


class Noted:
    """A logits processor that keeps what it is given."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.logits.append(scores[0].clone())
        return scores


@cache
def runner(kind: str, *, deterministic: bool, blocks: bool) -> GraphRunner:
    return eager_runner(model(kind), tiny_config(**BLOCKS if blocks else {}), deterministic=deterministic)


Arrival = tuple[int, tuple[int, int, int], int | None]


def prompt_of(number: int, shared: int, own: int) -> np.ndarray:
    return np.concatenate([SHARED[:shared], random_tokens(own, seed=number)])


@cache
def alone(steps: GraphRunner, number: int, shared: int, own: int, new: int) -> tuple[list[int], list[Tensor]]:
    """Tokens and logits of a request that nobody is served beside."""
    noted = Noted()
    engine = Engine(steps, SchedulerOptions(prefix_reuse=False), vocab_size=VOCAB)
    engine.add_request(
        Request(
            request_id="alone",
            prompt_token_ids=prompt_of(number, shared, own),
            max_new_tokens=new,
            processors=LogitsProcessorList([noted]),
        )
    )
    return [event.token_id for event in engine.run()], noted.logits


def serve(engine: Engine, arrivals: Sequence[Arrival]) -> list[tuple[list[int], list[Tensor]]]:
    """Each request: the step before which it arrives, its prompt and new tokens, and the steps after which it is aborted."""
    for state in engine.runner.executable._states.values():  # type: ignore[attr-defined]
        if state.is_floating_point():
            state.fill_(torch.nan)
    tokens: list[list[int]] = [[] for _ in arrivals]
    noted = [Noted() for _ in arrivals]
    step = 0
    while engine.has_work or step <= max(at for at, _, _ in arrivals):
        for number, (at, (shared, own, new), aborted) in enumerate(arrivals):
            if at == step:
                engine.add_request(
                    Request(
                        request_id=str(number),
                        prompt_token_ids=prompt_of(number, shared, own),
                        max_new_tokens=new,
                        processors=LogitsProcessorList([noted[number]]),
                    )
                )
            if aborted is not None and at + aborted == step:
                engine.abort(str(number))
        for event in engine.step():
            tokens[int(event.request_id)].append(event.token_id)
        engine.scheduler.slots.check()
        step += 1
        assert step < 1000
    return [(each, note.logits) for each, note in zip(tokens, noted, strict=True)]


def arrivals() -> st.SearchStrategy[list[Arrival]]:
    sizes = st.tuples(st.sampled_from([0, 17, 25, 32]), st.integers(1, 20), st.integers(1, 5))
    when, aborted = st.integers(0, 9), st.none() | st.none() | st.integers(0, 9)
    return st.lists(st.tuples(when, sizes, aborted), min_size=2, max_size=6)


@pytest.mark.parametrize("kind", ["qwen3_5_text", *KINDS[1:]])
def test_in_one_graph_no_neighbor_slot_or_abort_changes_a_bit(kind: str) -> None:
    """Prompts of several rows, more requests than slots, in steps that mix them with decodes."""
    steps = runner(kind, deterministic=True, blocks=False)

    @examples(20)
    @given(arrivals())
    def check(workload: list[Arrival]) -> None:
        engine = Engine(steps, vocab_size=VOCAB)
        for number, (tokens, logits) in enumerate(serve(engine, workload)):
            _, sizes, aborted = workload[number]
            expected = alone(steps, number, *sizes)
            assert tokens == expected[0][: len(tokens)] and (aborted is not None or len(tokens) == sizes[2])
            assert all(torch.equal(*each) for each in zip(logits, expected[1], strict=False))

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_who_is_preempted_goes_on_with_the_same_tokens(kind: str) -> None:
    """Two of them need six blocks in the end, and there are four; another is aborted while it decodes."""
    steps = runner(kind, deterministic=False, blocks=True)
    sizes = [(40, 20, 75), (40, 19, 75), (17, 5, 20), (0, 9, 4)]
    crowd: list[Arrival] = [(0, sizes[0], None), (0, sizes[1], None), (100, sizes[2], 12), (110, sizes[3], None)]
    engine = Engine(steps, vocab_size=VOCAB)
    for number, (tokens, _) in enumerate(serve(engine, crowd)):
        assert tokens == alone(steps, number, *sizes[number])[0][: len(tokens)]
        assert len(tokens) == sizes[number][2] or number == 2
    assert engine.statistics.preemptions and engine.statistics.aborted == 1


@pytest.mark.parametrize("kind", KINDS)
def test_generate_and_generate_batch_give_what_transformers_does(kind: str, tmp_path: Path) -> None:
    model(kind).save_pretrained(tmp_path / "checkpoint")
    made = NeuronModelForCausalLM.from_pretrained(export_tiny(tmp_path / "checkpoint", tmp_path / "out"))
    own = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", dtype=torch.float32).eval()
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 8}
    prompts = [[*SHARED[:17], *random_tokens(count, seed=count)] for count in (1, 9, 2, 6)]
    expected = [
        own.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() for prompt in map(list, prompts)
    ]
    made.generation_config.eos_token_id = None
    outputs = made.generate_batch(prompts, max_new_tokens=8).values()
    assert [output.generated_tokens for output in outputs] == expected
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts[:3]])
    found = made.generate(ids, attention_mask=(ids > 0).long(), **options)
    assert found[:, longest:].tolist() == expected[:3]
