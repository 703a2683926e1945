# SPDX-License-Identifier: Apache-2.0
"""What vLLM's sampler does to the logits that the graphs return: penalties, forms, budgets and users' processors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from llm_answers import ask, ask_each, choose_by, random_prompt
from torch import Tensor
from vllm import LLM
from vllm.config import VllmConfig
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor


VOCAB = 49152
PROMPTS = [random_prompt(length, 3) for length in (3, 40, 33, 7, 64)]


@pytest.fixture
def llm(export_text: Callable[..., Path], open_llm: Callable[..., LLM]) -> LLM:
    return open_llm(
        export_text(),
        # JSON may otherwise have any number of spaces, which a random model makes use of.
        structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
        reasoning_config={"reasoning_start_str": "<|im_start|>", "reasoning_end_str": "<|im_end|>"},
    )


def test_penalties_are_applied_to_what_was_said(llm: LLM, text_model: Any) -> None:
    repetition, presence, frequency = 1.1, -0.5, 0.7
    penalties = {"repetition_penalty": repetition, "presence_penalty": presence, "frequency_penalty": frequency}
    # What the model would say is made likelier, so that penalties have something to do.
    answers = ask(llm, PROMPTS[:3], 12, **penalties, logit_bias=dict.fromkeys(range(200, 203), 8.0))
    for prompt, answer in zip(PROMPTS[:3], answers, strict=True):

        def change(logits: Tensor, generated: list[int], prompt: list[int] = prompt) -> Tensor:
            logits = logits.clone()
            logits[200:203] += 8.0
            for token in {*prompt, *generated}:
                logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
            for token in set(generated):
                logits[token] -= presence + frequency * generated.count(token)
            return logits

        assert answer == choose_by(text_model, prompt, 12, change)
        assert answer != choose_by(text_model, prompt, 12, lambda logits, _: logits)


def only(allowed: Sequence[int]) -> Callable[..., Tensor]:
    def change(logits: Tensor, _: list[int]) -> Tensor:
        return torch.full_like(logits, -torch.inf).index_copy_(0, torch.tensor(allowed), logits[allowed])

    return change


def without(forbidden: Callable[[list[int]], Sequence[int]]) -> Callable[..., Tensor]:
    def change(logits: Tensor, generated: list[int]) -> Tensor:
        return logits.index_fill(0, torch.tensor(forbidden(generated), dtype=torch.long), -torch.inf)

    return change


def test_allowed_tokens_biases_and_minimal_lengths_are_honoured(llm: LLM, text_model: Any) -> None:
    prompt = PROMPTS[1]
    plain = choose_by(text_model, prompt, 8, lambda logits, _: logits)
    allowed = [5, 1000, 20000, 49151, *plain[1:3]]
    assert ask(llm, [prompt], 8, allowed_token_ids=allowed)[0] == choose_by(text_model, prompt, 8, only(allowed))
    assert ask(llm, [prompt], 4, logit_bias={77: 100.0})[0] == [77] * 4
    stop = plain[2]
    early = plain.index(stop) + 1
    assert ask(llm, [prompt], 8, stop_token_ids=[stop])[0] == plain[:early]
    late = choose_by(text_model, prompt, 8, without(lambda generated: [stop] if len(generated) < 5 else []))
    ends = next((index + 1 for index in range(5, 8) if late[index] == stop), 8)
    assert ask(llm, [prompt], 8, stop_token_ids=[stop], min_tokens=5)[0] == late[:ends]


@pytest.mark.parametrize("budget", [0, 3])
def test_thoughts_end_with_their_budget(llm: LLM, text_model: Any, budget: int) -> None:
    tokenizer = llm.get_tokenizer()
    prompt, end = [*PROMPTS[3], *tokenizer.encode("<|im_start|>")], tokenizer.encode("<|im_end|>")
    thought = choose_by(text_model, prompt, budget, lambda logits, _: logits)
    answer = choose_by(text_model, [*prompt, *thought, *end], 4, lambda logits, _: logits)
    assert ask(llm, [prompt], budget + len(end) + 4, thinking_token_budget=budget)[0] == [*thought, *end, *answer]


SCHEMA = {
    "type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}, "open": {"type": "boolean"}},
    "required": ["city", "open"], "additionalProperties": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("structure", "pattern", "temperature"),
    [
        ({"choice": ["Paris", "Rome is old", "Oslo"]}, "Paris|Rome is old|Oslo", 0),
        ({"regex": r"[0-9]{3}-[a-f]{4}"}, r"[0-9]{3}-[a-f]{4}", 1),
        ({"json": SCHEMA}, None, 1),
    ],
    ids=["choice", "regex", "json"],
)
def test_structured_answers_have_their_form_beside_others_that_have_none(
    llm: LLM, structure: dict[str, Any], pattern: str | None, temperature: float
) -> None:
    plain = ask(llm, [PROMPTS[0], PROMPTS[4]], 9)
    shaped = {"temperature": temperature, "seed": 3, "max_tokens": 60, "ignore_eos": False, "detokenize": True}
    shaped["structured_outputs"] = StructuredOutputsParams(**structure)
    free = {"temperature": 0, "max_tokens": 9}
    outputs = ask_each(llm, PROMPTS, [free, shaped, shaped, shaped, free])
    for output in outputs[1:4]:
        text = output.outputs[0].text
        if pattern is not None:
            assert re.fullmatch(pattern, text), text
        else:
            assert json.loads(text).keys() == {"city", "open"}, text
    assert [list(outputs[index].outputs[0].token_ids) for index in (0, 4)] == plain


class OddTokens(LogitsProcessor):
    """A user's processor: after an even token only odd ones, and the other way round."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._said: dict[int, tuple[Sequence[int], list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._said.pop(index, None)
        for index, _, prompt, output in batch_update.added:
            self._said[index] = (prompt or [], output)
        for source, destination, _ in batch_update.moved:
            self._said[destination] = self._said.pop(source)

    def apply(self, logits: Tensor) -> Tensor:
        for index, (prompt, output) in self._said.items():
            logits[index, [*prompt, *output][-1] % 2 :: 2] = -torch.inf
        return logits


def test_a_users_processor_sees_every_request_and_all_that_it_said(
    export_text: Callable[..., Path], open_llm: Callable[..., LLM], text_model: Any
) -> None:
    llm = open_llm(export_text(), logits_processors=[OddTokens])

    def change(prompt: list[int]) -> Callable[..., Tensor]:
        return without(lambda generated: range([*prompt, *generated][-1] % 2, VOCAB, 2))

    counts = [7, 3, 9, 2, 5]
    expected = [
        choose_by(text_model, prompt, count, change(prompt)) for prompt, count in zip(PROMPTS, counts, strict=True)
    ]
    assert ask(llm, PROMPTS, counts) == expected
