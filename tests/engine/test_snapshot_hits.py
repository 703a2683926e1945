# SPDX-License-Identifier: Apache-2.0
"""Prompts that go on behind a snapshot, of each kind of state: the bits of who computes the whole prompt, wherever they part."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import compressing
import numpy as np
import pytest
import recurrent
import selecting
import torch
from helpers import (
    VOCAB,
    decode_tokens,
    eager_runner,
    load_model,
    prefill_pieces,
    random_tokens,
    reuse_prefix,
    tiny_config,
)
from invariants import check_cache
from torch import Tensor
from transformers import LogitsProcessorList

from optimum_neuron.core import Request
from optimum_neuron.engine.engine import Engine
from optimum_neuron.engine.policy import SchedulerOptions
from optimum_neuron.runtime.runner import GraphRunner


CHUNK, SNAPSHOTS = 8, 3
TEXT = random_tokens(60, seed=11)
# A recurrence beside a convolution; compressed keys; a recurrence beside keys by which a layer selects.
KINDS = ["nemotron_h", "deepseek_v4", "qwen4_exp_text"]


@pytest.fixture(scope="module")
def open_steps(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., GraphRunner]:
    """One graph, so that a row's bits do not follow the shape of the step."""

    @cache
    def model(kind: str) -> Any:
        if kind == "deepseek_v4":
            return compressing.cached()
        if kind in selecting.CONFIGS:
            return load_model(selecting.make_checkpoint(kind, tmp_path_factory.mktemp(kind)))
        return recurrent.model(kind)

    @cache
    def runner(kind: str, **changes: Any) -> GraphRunner:
        sizes = {"ctx_batch_size": 1, "state_snapshots": SNAPSHOTS}
        return eager_runner(model(kind), tiny_config(**sizes | changes), deterministic=True)

    return runner


def overwrite(steps: GraphRunner, slot: int | None = None) -> None:
    """NaN, and indices beyond all, in whatever a slot, or all of them, and those of padding, hold."""
    executable: Any = steps.executable
    for state in executable._states.values():
        state[slice(None) if slot is None else slot] = np.nan if state.dtype.kind == "f" else 7


def whole(steps: GraphRunner, slot: int, prompt: np.ndarray) -> Tensor:
    """A prompt from its start in full chunks: what follows it, and the token after that."""
    pieces = [CHUNK] * (len(prompt) // CHUNK) + [len(prompt) % CHUNK] * (len(prompt) % CHUNK > 0)
    return followed(steps, slot, prefill_pieces(steps, slot, prompt, pieces))


def followed(steps: GraphRunner, slot: int, logits: Tensor) -> Tensor:
    return torch.stack([logits, *(decode_tokens(steps, {slot: token})[1][slot] for token in (5, 6, 7))])


@pytest.mark.parametrize("blocks", [False, pytest.param(True, marks=pytest.mark.full)], ids=["slots", "blocks"])
@pytest.mark.parametrize(
    "kind", [KINDS[1], KINDS[2], *(pytest.param(kind, marks=pytest.mark.full) for kind in (KINDS[0], "deepseek_v32"))]
)
def test_a_slot_goes_on_behind_a_snapshot_at_any_place(
    open_steps: Callable[..., GraphRunner], kind: str, blocks: bool
) -> None:
    """Of a model that selects keys and keeps no state, its rows are copied alone."""
    sizes = {"kv_block_size": 64, "kv_cache_tokens": 192} if blocks else {}
    steps = open_steps(kind, **sizes)
    has_state = steps.kept.needed
    assert has_state == (kind != "deepseek_v32")
    for length in (1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3):
        steps.reset_slots()
        overwrite(steps)
        for slot in range(3) if blocks else ():
            steps.assign_blocks(slot, 0, [slot])
        prompt = np.concatenate([TEXT[:length], random_tokens(11, seed=length)])
        expected = whole(steps, 2, prompt)
        prefill_pieces(steps, 0, TEXT[:length], [min(CHUNK, length - at) for at in range(0, length, CHUNK)])
        if has_state:
            steps.keep_state(0, 1)
        prefill_pieces(steps, 0, TEXT[length : length + 5], [5])
        for slot in (1, 0):  # a copy of what went on meanwhile, and in its place
            if slot:
                overwrite(steps, slot)
            reuse_prefix(steps, slot, 0, length, 1 if has_state else None)
            logits = prefill_pieces(steps, slot, prompt[length:], [3, CHUNK])
            assert torch.equal(followed(steps, slot, logits), expected)


class Served:
    """An engine of which each request's logits are noted, and whose slots are overwritten wherever nobody has one."""

    def __init__(self, steps: GraphRunner, **options: Any) -> None:
        self.steps = steps
        self.engine = Engine(steps, SchedulerOptions(**options), vocab_size=VOCAB)
        self._logits: dict[str, list[Tensor]] = {}

    def add(self, name: str, prompt: np.ndarray, new: int = 3) -> None:
        logits = self._logits[name] = []

        def note(ids: Tensor, scores: Tensor) -> Tensor:
            logits.append(scores[0].clone())
            return scores

        self.engine.add_request(
            Request(
                request_id=name, prompt_token_ids=prompt, max_new_tokens=new, processors=LogitsProcessorList([note])
            )
        )

    def finish(self) -> None:
        while self.engine.has_work:
            self.engine.step()
            check_cache(self.engine.scheduler.cache)

    def serve(self, name: str, prompt: np.ndarray, new: int = 3) -> tuple[int, Tensor]:
        """How many tokens of a prompt were not computed, and the logits of all new ones."""
        executable: Any = self.steps.executable
        for state, _ in executable._kept:
            state.fill(np.nan if state.dtype.kind == "f" else 7)
        before = self.engine.statistics.prefix_hit_tokens
        self.add(name, prompt, new)
        self.finish()
        return self.engine.statistics.prefix_hit_tokens - before, self.logits(name)

    def logits(self, name: str) -> Tensor:
        return torch.stack(self._logits[name])


def alone(steps: GraphRunner, prompt: np.ndarray, new: int = 3) -> Tensor:
    return Served(steps, prefix_reuse=False).serve("alone", prompt, new)[1]


def behind(length: int, own: int, seed: int) -> np.ndarray:
    return np.concatenate([TEXT[:length], random_tokens(own, seed=seed)])


@pytest.mark.parametrize("kind", [*(pytest.param(kind, marks=pytest.mark.full) for kind in KINDS[1:]), KINDS[0]])
def test_the_third_that_starts_alike_goes_on_where_the_second_parted(
    open_steps: Callable[..., GraphRunner], kind: str
) -> None:
    """From 16 tokens on, whether that is in a chunk, at its end or behind it. No bit tells who had a prefix."""
    steps = open_steps(kind)
    for length, has in ((0, 0), (1, 0), (15, 0), (16, 16), (17, 17), (23, 23), (24, 24), (25, 25)):
        served = Served(steps)
        for number, hit in enumerate((0, 0, has)):
            prompt = behind(length, 20 - number, seed=number)
            found, logits = served.serve(str(number), prompt)
            assert (found, length) == (hit, length) and torch.equal(logits, alone(steps, prompt))


@pytest.mark.parametrize("kind", [*KINDS[:2], pytest.param(KINDS[2], marks=pytest.mark.full)])
def test_a_prompt_that_is_aborted_leaves_what_its_whole_chunks_left(
    open_steps: Callable[..., GraphRunner], kind: str
) -> None:
    """Of 40 tokens it takes in 24; each 16 a snapshot is kept, so one of 16 tokens, and not of what its slot goes on to have."""
    for interval, has in ((None, 0), (16, 16)):
        steps = open_steps(kind, state_snapshot_interval=interval)
        served = Served(steps)
        served.add("a", TEXT[:40])
        for _ in range(3):
            served.engine.step()
        served.engine.abort_request("a")
        prompt = behind(24, 9, seed=2)
        found, logits = served.serve("b", prompt)
        assert found == has and torch.equal(logits, alone(steps, prompt))


@pytest.mark.parametrize("kind", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.full) for kind in KINDS[1:])])
def test_more_prompts_than_places_at_once_get_their_own_bits(
    open_steps: Callable[..., GraphRunner], kind: str
) -> None:
    """One place for all: who finds its snapshot given away meanwhile computes its prompt."""
    steps = open_steps(kind, state_snapshots=1, state_snapshot_interval=CHUNK)
    served = Served(steps)
    prompts = {
        f"{length} {number}": behind(length, 6 + number, seed=number) for number in range(3) for length in (16, 33)
    }
    served.serve("first", TEXT[:16])
    for name, prompt in prompts.items():
        served.add(name, prompt)
    served.engine.step()
    served.finish()
    assert all(torch.equal(served.logits(name), alone(steps, prompt)) for name, prompt in prompts.items())
    assert served.engine.statistics.prefix_hit_tokens >= 16


def test_snapshots_are_void_where_a_step_failed(
    open_steps: Callable[..., GraphRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had overwritten one, and nobody took note: later rows of the same tokens are not gone on behind with it."""
    steps = open_steps("nemotron_h", state_snapshots=2)
    served, prompt, keep = Served(steps), behind(16, 5, seed=3), steps.keep_state

    def fail(slot: int, snapshot: int) -> None:
        keep(slot, snapshot)
        raise RuntimeError("no device")

    served.serve("a", TEXT[:24])
    served.add("b", random_tokens(16, seed=2))
    with monkeypatch.context() as broken, pytest.raises(RuntimeError, match="no device"):
        broken.setattr(steps, "keep_state", fail)
        served.finish()
    served.add("c", TEXT[:40], new=9)
    for _ in range(2):
        served.engine.step()
    served.add("d", prompt)
    served.finish()
    assert torch.equal(served.logits("d"), alone(steps, prompt))
