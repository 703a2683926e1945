# SPDX-License-Identifier: Apache-2.0
"""Models with rows that keep state next to keys and values: each request gets the bits that it gets alone, also after a snapshot."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import compressing
import numpy as np
import pytest
import selecting
import torch
from engine_requests import serve, serve_alone
from feature_models import cached
from helpers import VOCAB, eager_runner, examples, export_tiny, load_model, random_tokens, tiny_config
from hypothesis import given
from hypothesis import strategies as st
from invariants import check_cache
from recurrent import SERVED, model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LogitsProcessorList

from optimum_neuron import NeuronModelForCausalLM
from optimum_neuron.arrays import to_torch
from optimum_neuron.core import Request
from optimum_neuron.engine.engine import Engine
from optimum_neuron.engine.policy import SchedulerOptions
from optimum_neuron.runtime.runner import GraphRunner


CHUNK = 8
SHARED = random_tokens(60, seed=7)
BROKEN = 77  # the token with a row of the embedding that is NaN
# Four blocks for three rows that could use three each.
BLOCKS: dict[str, Any] = {
    "sequence_length": 192, "context_buckets": (192,), "kv_block_size": 64, "kv_cache_tokens": 256,
}  # fmt: skip
KINDS = [pytest.param(kind, marks=[pytest.mark.full] * (kind != "nemotron_h")) for kind in SERVED]


@pytest.fixture(scope="module")
def open_steps(
    tmp_path_factory: pytest.TempPathFactory, tiny_models: dict[str, nn.Module]
) -> Callable[..., GraphRunner]:
    """Runners by kind of model, where nothing else is said of one graph, so that a row's bits do not follow the shape of the step."""

    @cache
    def make(kind: str) -> Any:
        if kind == "deepseek_v4":
            return cached(compressing.reference)
        if kind in selecting.CONFIGS:
            return load_model(selecting.make_checkpoint(kind, tmp_path_factory.mktemp(kind)))
        return tiny_models[kind] if kind == "llama" else model(kind)

    @cache
    def runner(kind: str, deterministic: bool = True, **changes: Any) -> GraphRunner:
        sizes = {"ctx_batch_size": 1, "state_snapshots": 3}
        return eager_runner(make(kind), tiny_config(**sizes | changes), deterministic=deterministic)

    return runner


def overwrite(steps: GraphRunner, *, rows: bool = False, slot: int | None = None) -> None:
    """Leave NaN, and indices beyond all, in the states that slots keep as a whole, or in rows of tokens, too."""
    executable: Any = steps.executable
    for state in executable._states.values() if rows else [state for state, _ in executable._kept]:
        to_torch(state)[slice(None) if slot is None else slot] = np.nan if state.dtype.kind == "f" else 7


class Served:
    """An engine that notes the tokens and logits of each request."""

    def __init__(self, steps: GraphRunner, **options: Any) -> None:
        self.engine = Engine(steps, SchedulerOptions(**options), vocab_size=VOCAB)
        self.tokens: dict[str, list[int]] = {}
        self.logits: dict[str, list[Tensor]] = {}

    def add(self, name: str, prompt: Sequence[int] | np.ndarray, new: int = 3) -> None:
        self.tokens[name], self.logits[name] = [], []

        def note(ids: Tensor, scores: Tensor) -> Tensor:
            self.logits[name].append(scores[0].clone())
            return scores

        noted = LogitsProcessorList([note])
        self.engine.add_request(
            Request(request_id=name, prompt_token_ids=prompt, max_new_tokens=new, processors=noted)
        )

    def step(self) -> None:
        for event in self.engine.step():
            self.tokens[event.request_id].append(event.token_id)
        check_cache(self.engine.scheduler.cache)

    def finish(self) -> None:
        while self.engine.has_work:
            self.step()

    def serve(self, name: str, prompt: Sequence[int] | np.ndarray, new: int = 3) -> int:
        """Serve a request to its end, whatever was left in slots; return how many tokens of its prompt were not computed."""
        overwrite(self.engine.runner)
        before = self.engine.statistics.prefix_hit_tokens
        self.add(name, prompt, new)
        self.finish()
        return self.engine.statistics.prefix_hit_tokens - before

    def check(
        self, name: str, prompt: Sequence[int] | np.ndarray, new: int = 3, *, whole: bool = True, bits: bool = True
    ) -> None:
        """Compare with what a request gets alone, as far as it got; also the bits of its logits."""
        tokens, logits = alone(self.engine.runner, tuple(map(int, prompt)), new)
        count = len(self.tokens[name])
        assert self.tokens[name] == tokens[:count] and (count == new or not whole)
        assert not bits or all(map(torch.equal, self.logits[name], logits))


@cache
def alone(steps: GraphRunner, prompt: tuple[int, ...], new: int) -> tuple[list[int], list[Tensor]]:
    served = Served(steps, prefix_reuse=False)
    served.serve("alone", prompt, new)
    return served.tokens["alone"], served.logits["alone"]


def prompt_of(number: int, shared: int, own: int) -> np.ndarray:
    return np.concatenate([SHARED[:shared], random_tokens(own, seed=number)])


# The step before which a request arrives, its shared, own and new tokens, and the steps after which it is aborted.
Arrival = tuple[int, tuple[int, int, int], int | None]


def play(served: Served, arrivals: Sequence[Arrival]) -> None:
    overwrite(served.engine.runner, rows=True)
    step = 0
    while served.engine.has_work or step <= max(at for at, _, _ in arrivals):
        if not served.engine.has_work:
            overwrite(served.engine.runner)
        for number, (at, (shared, own, new), aborted) in enumerate(arrivals):
            if at == step:
                served.add(str(number), prompt_of(number, shared, own), new)
            if aborted is not None and at + aborted == step:
                served.engine.abort_request(str(number))
        served.step()
        step += 1
        assert step < 1000


def check_all(served: Served, arrivals: Sequence[Arrival], *, bits: bool = True) -> None:
    for number, (_, (shared, own, new), aborted) in enumerate(arrivals):
        served.check(str(number), prompt_of(number, shared, own), new, whole=aborted is None, bits=bits)


def workloads() -> st.SearchStrategy[list[Arrival]]:
    sizes = st.tuples(st.sampled_from([0, 17, 25, 32]), st.integers(1, 20), st.integers(1, 5))
    when, aborted = st.integers(0, 9), st.none() | st.none() | st.integers(0, 9)
    return st.lists(st.tuples(when, sizes, aborted), min_size=2, max_size=6)


@pytest.mark.parametrize("kind", ["qwen3_5_text", *KINDS[1:]])
def test_in_one_graph_no_neighbor_slot_or_abort_changes_a_bit(
    open_steps: Callable[..., GraphRunner], kind: str
) -> None:
    """Prompts of several rows, more requests than slots, in steps that mix them with decodes."""
    steps = open_steps(kind, ctx_batch_size=2)

    @examples(20)
    @given(workloads())
    def check(arrivals: list[Arrival]) -> None:
        served = Served(steps)
        play(served, arrivals)
        check_all(served, arrivals)

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_a_preempted_request_continues_with_the_same_tokens(open_steps: Callable[..., GraphRunner], kind: str) -> None:
    """Two of them need six blocks in the end, and there are four; another is aborted while it decodes."""
    sizes = [(40, 20, 75), (40, 19, 75), (17, 5, 20), (0, 9, 4)]
    crowd: list[Arrival] = [(0, sizes[0], None), (0, sizes[1], None), (100, sizes[2], 12), (110, sizes[3], None)]
    served = Served(open_steps(kind, deterministic=False, ctx_batch_size=2, **BLOCKS))
    play(served, crowd)
    check_all(served, crowd, bits=False)  # what was generated is computed again as a prompt
    counted = served.engine.statistics
    assert counted.preemptions and counted.aborted == 1 and counted.prefix_hit_tokens > 0


@pytest.mark.parametrize("kind", ["llama", *KINDS])
def test_a_hit_changes_no_bit_whatever_the_slots_were_left_with(
    open_steps: Callable[..., GraphRunner], kind: str
) -> None:
    """One after another: each finds what those before it left, in two snapshots alone. Then many at once, in blocks, too."""
    requests = [(0, 12), (32, 5), (32, 7), (32, 9), (40, 3), (0, 12), (40, 8), (32, 6), (40, 9)]
    apart: list[Arrival] = [(12 * number, (*prompt, 2), None) for number, prompt in enumerate(requests)]
    together: list[Arrival] = [(number, (*prompt, 3), None) for number, prompt in enumerate(requests)]
    for changes, arrivals, least in (({}, apart, 6 * 32), ({}, together, 32), (BLOCKS, apart, 6 * 32)):
        served = Served(open_steps(kind, state_snapshots=2, **changes))
        play(served, arrivals)
        check_all(served, arrivals)
        assert served.engine.statistics.prefix_hit_tokens >= least


def test_no_request_continues_after_what_a_broken_one_left() -> None:
    """It is kept, as of any request; who starts like it, but for the broken token, finds the snapshot before that alone."""
    made = copy.deepcopy(model("nemotron_h"))
    made.get_input_embeddings().weight.data[BROKEN] = torch.nan
    steps = eager_runner(made, tiny_config(ctx_batch_size=1), deterministic=True)
    clean = SHARED[SHARED != BROKEN][:32].tolist()
    prompts = [[*clean, 5, 6, 7], [*clean, BROKEN, 8, 9], [*clean, BROKEN, 8, 9, 10], [*clean, 8, 9, 5]]
    requests = [
        Request(request_id=str(number), prompt_token_ids=prompt, max_new_tokens=4)
        for number, prompt in enumerate(prompts)
    ]
    alone = [serve_alone(steps, request) for request in requests]
    engine = Engine(steps, vocab_size=VOCAB)
    assert [serve(engine, [request])[0][request.request_id] for request in requests] == alone
    assert alone[1] == [0] * 4 != alone[3] and engine.statistics.prefix_hit_tokens == 32 + 35 + 32


# Compressed keys; a recurrence next to keys by which a layer selects; a recurrence next to a convolution; selected keys alone.
@pytest.mark.parametrize(
    "kind",
    [
        "deepseek_v4",
        "qwen4_exp_text",
        *(pytest.param(each, marks=pytest.mark.full) for each in ("nemotron_h", "deepseek_v32")),
    ],
)
def test_the_third_that_starts_alike_continues_where_the_second_parted(
    open_steps: Callable[..., GraphRunner], kind: str
) -> None:
    """From 16 tokens on, whether that is in a chunk, at its end or after it."""
    for length, has in ((0, 0), (1, 0), (15, 0), (16, 16), (17, 17), (23, 23), (24, 24), (25, 25)):
        served = Served(open_steps(kind))
        prompts = [prompt_of(number, length, 20 - number) for number in range(3)]
        hits = [served.serve(str(number), prompt) for number, prompt in enumerate(prompts)]
        # A model that selects keys and keeps no state has its rows copied alone, for the second one already.
        assert hits[2] == has and (hits[1] == 0 or not served.engine.runner.kept.needed), length
        for number, prompt in enumerate(prompts):
            served.check(str(number), prompt)


@pytest.mark.parametrize("kind", ["nemotron_h", "deepseek_v4"])
def test_a_prompt_that_is_aborted_leaves_what_its_whole_chunks_left(
    open_steps: Callable[..., GraphRunner], kind: str
) -> None:
    """Of 40 tokens it takes in 24; each 16 a snapshot is kept, so one of 16 tokens, and not of what its slot goes on to have."""
    for interval, has in ((None, 0), (16, 16)):
        served, prompt = Served(open_steps(kind, state_snapshot_interval=interval)), prompt_of(2, 24, 9)
        served.add("a", SHARED[:40])
        for _ in range(3):
            served.step()
        served.engine.abort_request("a")
        assert served.serve("b", prompt) == has
        served.check("b", prompt)


def test_snapshots_are_void_where_a_step_failed(
    open_steps: Callable[..., GraphRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had overwritten one, which was not noted: no later row of the same tokens continues after it."""
    steps = open_steps("nemotron_h", state_snapshots=2)
    served, prompt, keep = Served(steps), prompt_of(3, 16, 5), steps.keep_state

    def fail(slot: int, snapshot: int) -> None:
        keep(slot, snapshot)
        raise RuntimeError("no device")

    served.serve("a", SHARED[:24])
    served.add("b", random_tokens(16, seed=2))
    with monkeypatch.context() as broken, pytest.raises(RuntimeError, match="no device"):
        broken.setattr(steps, "keep_state", fail)
        served.finish()
    served.add("c", SHARED[:40], new=9)
    served.step()
    served.step()
    served.add("d", prompt)
    served.finish()
    served.check("d", prompt)


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
