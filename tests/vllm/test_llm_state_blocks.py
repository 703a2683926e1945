# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine over blocks and a model whose rows keep state beside them: who goes on behind a prefix gets the bits of who computes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import compressing
import pytest
import recurrent
import torch
from helpers import export_tiny
from llm_answers import random_prompt
from torch import Tensor
from vllm import LLM, SamplingParams


BLOCK, NEW, VOCAB = 64, 3, 300
SIZES: dict[str, Any] = {
    "batch_size": 4,
    "sequence_length": 192,
    "context_buckets": (192,),
    "prefill_chunk_size": 32,
    "prefill_chunk_buckets": (),
    "ctx_batch_size": 1,
    "kv_block_size": BLOCK,
    "kv_cache_tokens": 1024,
    "output_logits": True,
}
TEXT = random_prompt(170, vocab=VOCAB)
# The gated delta rule beside attention, Mamba-2 beside attention, compressed keys.
KINDS = ["gated delta", "nemotron_h", "deepseek_v4"]


def cases(second: Sequence[Any], usual: Sequence[tuple[str, Any]]) -> list[Any]:
    """Each kind with each of the others; all but the usual ones in full."""
    return [
        pytest.param(kind, other, marks=[pytest.mark.full] * ((kind, other) not in usual))
        for kind in KINDS
        for other in second
    ]


class Answer(NamedTuple):
    """What a request got: tokens that it did not compute, and `[new tokens, vocab]` the logits that chose its tokens."""

    cached: int
    logits: Tensor


Open = Callable[..., LLM]


@pytest.fixture(scope="module")
def open_kind(tmp_path_factory: pytest.TempPathFactory, open_llm: Callable[..., LLM]) -> Open:
    """Engines by kind, target and sizes."""
    made: dict[str, Path] = {}

    def open_one(kind: str, target: str, **changes: Any) -> LLM:
        key = repr((kind, target, changes))
        if key not in made:
            folder = tmp_path_factory.mktemp("kind")
            model = compressing.reference() if kind == "deepseek_v4" else recurrent.model(kind)
            model.save_pretrained(folder / "checkpoint")
            made[key] = export_tiny(folder / "checkpoint", folder / "out", target=target, **SIZES | changes)
        return open_llm(
            made[key], skip_tokenizer_init=True, disable_log_stats=False, max_logprobs=-1, logprobs_mode="raw_logits"
        )

    return open_one


def behind(length: int, own: int, seed: int) -> list[int]:
    return TEXT[:length] + random_prompt(own, seed, vocab=VOCAB)


def serve(
    llm: LLM,
    requests: Sequence[tuple[list[int], int]],
    at: Sequence[int] = (),
    aborted: dict[int, int] | None = None,
    **params: Any,
) -> list[Answer]:
    """Prompts with how many new tokens each gets, all in one crowd.

    Args:
        at: the step before which each comes; at once where it is not said.
        aborted: request to the step before which it is.
    """
    params = {"temperature": 0, "ignore_eos": True, "detokenize": False, "logprobs": -1} | params
    engine = llm.llm_engine
    found = [Answer(0, torch.empty(0, VOCAB))] * len(requests)
    waiting = dict(enumerate(at or [0] * len(requests)))
    step = 0
    while waiting or engine.has_unfinished_requests():
        for number in [number for number, when in waiting.items() if when <= step]:
            prompt, new = requests[number]
            engine.add_request(str(number), {"prompt_token_ids": prompt}, SamplingParams(max_tokens=new, **params))
            del waiting[number]
        engine.abort_request([str(number) for number, when in (aborted or {}).items() if when == step])
        for output in engine.step():
            told = [[each[token].logprob for token in range(VOCAB)] for each in output.outputs[0].logprobs]
            found[int(output.request_id)] = Answer(output.num_cached_tokens, torch.tensor(told))
        step += 1
        assert step < 1000
    return found


def alone(llm: LLM, prompt: list[int], new: int = NEW) -> Tensor:
    """The logits of who computes all of its prompt, with nobody beside it."""
    [answer] = serve(llm, [(prompt, new)], skip_reading_prefix_cache=True)
    assert answer.cached == 0
    return answer.logits


@pytest.mark.parametrize(
    ("kind", "target"),
    cases(["eager", "cpu"], [("gated delta", "eager"), ("nemotron_h", "cpu"), ("deepseek_v4", "eager")]),
)
def test_a_hit_at_a_border_of_blocks_changes_no_bit(open_kind: Open, kind: str, target: str) -> None:
    """The first prompt leaves its state at 128. Who parts from it one block before leaves some at 64, if it has so much in common."""
    llm = open_kind(kind, target)
    serve(llm, [(TEXT[:150], 1)])
    for length, cached in [(0, 0), (1, 0), (63, 0), (64, 0), (65, 64), (127, 64), (128, 128), (129, 128)]:
        prompt = behind(length, 9, seed=length)
        [answer] = serve(llm, [(prompt, NEW)])
        assert (length, answer.cached) == (length, cached)
        assert torch.equal(answer.logits, alone(llm, prompt))


@pytest.mark.parametrize(("kind", "snapshots"), cases([1, 4], [("gated delta", 1), ("nemotron_h", 4)]))
def test_in_a_crowd_that_is_preempted_and_aborted_nobody_has_other_bits(
    open_kind: Open, kind: str, snapshots: int
) -> None:
    """Four blocks for those who need three each, with a place or four for state; prompts start alike at once and later."""
    llm = open_kind(kind, "cpu", kv_cache_tokens=4 * BLOCK, state_snapshots=snapshots)
    requests = [
        (behind(length, own, seed), new)
        for seed, (length, own, new) in enumerate([(70, 40, 45), (70, 44, 45), (100, 20, 20), (66, 9, 4), (64, 5, 4)])
    ]
    answers = serve(llm, requests, at=[0, 0, 9, 9, 14], aborted={2: 60})
    count = next(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")
    assert count and (snapshots == 1 or sum(answer.cached for answer in answers))
    for number, ((prompt, new), answer) in enumerate(zip(requests, answers, strict=True)):
        assert torch.equal(answer.logits, alone(llm, prompt, new)[: len(answer.logits)])
        assert len(answer.logits) == new or number == 2
