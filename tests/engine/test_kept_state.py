# SPDX-License-Identifier: Apache-2.0
"""Models whose slots keep state beside keys and values: each request gets what it gets alone, whoever comes, goes or is preempted."""

from __future__ import annotations

import copy
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
from invariants import check_cache
from recurrent import SERVED, model
from torch import Tensor
from transformers import AutoModelForCausalLM, LogitsProcessorList

from optimum_neuron import NeuronModelForCausalLM
from optimum_neuron.arrays import to_torch
from optimum_neuron.core import Request
from optimum_neuron.engine.engine import Engine
from optimum_neuron.engine.policy import SchedulerOptions
from optimum_neuron.runtime.runner import GraphRunner


SHARED = random_tokens(40, seed=7)
BROKEN = 77  # the token whose row of the embedding is NaN
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
    return [event.token_id for event in engine.run_requests()], noted.logits


def overwrite(steps: GraphRunner, *, rows: bool) -> None:
    """Leaves what a broken request would: in the states that slots keep as a whole, or in rows of tokens, too."""
    executable: Any = steps.executable
    states = executable._states.values() if rows else [state for state, _ in executable._kept]
    for state in map(to_torch, states):
        state.fill_(torch.nan if state.is_floating_point() else 7)


def serve(engine: Engine, arrivals: Sequence[Arrival]) -> list[tuple[list[int], list[Tensor]]]:
    """Each request: the step before which it arrives, its prompt and new tokens, and the steps after which it is aborted."""
    overwrite(engine.runner, rows=True)
    tokens: list[list[int]] = [[] for _ in arrivals]
    noted = [Noted() for _ in arrivals]
    step = 0
    while engine.has_work or step <= max(at for at, _, _ in arrivals):
        if not engine.has_work:
            overwrite(engine.runner, rows=False)
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
                engine.abort_request(str(number))
        for event in engine.step():
            tokens[int(event.request_id)].append(event.token_id)
        check_cache(engine.scheduler.cache)
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
    assert engine.statistics.prefix_hit_tokens > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_hit_changes_no_bit_whatever_the_slots_were_left_with(kind: str) -> None:
    """One after another: each finds what those before it left, in two snapshots alone. Then many at once, in blocks, too."""
    requests = [(0, 12), (32, 5), (32, 7), (32, 9), (40, 3), (0, 12), (40, 8), (32, 6), (40, 9)]
    sizes = {"state_snapshots": 2, "ctx_batch_size": 1}
    for changes, crowds in ((sizes, 2), (sizes | BLOCKS, 1)):
        steps = eager_runner(model(kind), tiny_config(**changes), deterministic=True)
        engine = Engine(steps, vocab_size=VOCAB)
        apart: list[Arrival] = [(12 * number, (*prompt, 2), None) for number, prompt in enumerate(requests)]
        together: list[Arrival] = [(number, (*prompt, 3), None) for number, prompt in enumerate(requests)]
        for workload, least in [(apart, 6 * 32), (together, 32)][:crowds]:
            for number, (tokens, logits) in enumerate(serve(engine, workload)):
                expected = alone(steps, number, *workload[number][1])
                assert tokens == expected[0] and all(
                    torch.equal(*each) for each in zip(logits, expected[1], strict=True)
                )
            assert engine.statistics.prefix_hit_tokens >= least
            engine = Engine(steps, vocab_size=VOCAB)


def test_nobody_goes_on_behind_what_a_broken_request_left() -> None:
    """It is kept, as of any request; who starts like it, but for the broken token, finds the snapshot before that alone."""
    made = copy.deepcopy(model("nemotron_h"))
    made.get_input_embeddings().weight.data[BROKEN] = torch.nan
    steps = eager_runner(made, tiny_config(ctx_batch_size=1), deterministic=True)
    clean = SHARED[SHARED != BROKEN][:32]
    prompts = [[*clean, 5, 6, 7], [*clean, BROKEN, 8, 9], [*clean, BROKEN, 8, 9, 10], [*clean, 8, 9, 5]]
    requests = [
        Request(request_id=str(number), prompt_token_ids=prompt, max_new_tokens=4)
        for number, prompt in enumerate(prompts)
    ]
    alone = [[event.token_id for event in run(Engine(steps, vocab_size=VOCAB), request)] for request in requests]
    engine = Engine(steps, vocab_size=VOCAB)
    assert [[event.token_id for event in run(engine, request)] for request in requests] == alone
    assert alone[1] == [0] * 4 != alone[3] and engine.statistics.prefix_hit_tokens == 32 + 35 + 32


def run(engine: Engine, request: Request) -> list[Any]:
    engine.add_request(request)
    return list(engine.run_requests())


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
