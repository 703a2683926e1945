# SPDX-License-Identifier: Apache-2.0
"""What tests of vLLM's engine in this process share: prompts, questions, and the tokens that transformers would choose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm import LLM, SamplingParams


NEW = 12
# Requests that differ in who chooses their tokens and how.
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "top_k": 40, "seed": 1},  # drawn by the graphs
    {"temperature": 0.9, "top_k": 1000, "repetition_penalty": 1.1, "seed": 2},  # drawn by vLLM's sampler
    {"temperature": 1.2, "presence_penalty": 0.5, "logprobs": 2, "seed": 3},
    {"repetition_penalty": 1.3, "min_tokens": 4},
]


def random_prompt(length: int, seed: int = 0, vocab: int = 49000) -> list[int]:
    tokens: list[int] = np.random.default_rng([length, seed]).integers(100, vocab, length).tolist()
    return tokens


def greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    ids = torch.tensor([list(prompt)])
    options: dict[str, Any] = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
    output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), eos_token_id=None, **options)
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def ask(
    llm: LLM, prompts: Sequence[Sequence[int]], count: int | Sequence[int] = NEW, **params: Any
) -> list[list[int]]:
    """Greedy tokens, unless the parameters say otherwise."""
    counts = [count] * len(prompts) if isinstance(count, int) else count
    outputs = ask_each(llm, prompts, [{"temperature": 0, "max_tokens": each} | params for each in counts])
    return [list(output.outputs[0].token_ids) for output in outputs]


def ask_each(llm: LLM, prompts: Sequence[Sequence[int]], params: Sequence[dict[str, Any]], **common: Any) -> list[Any]:
    """The outputs of requests with parameters of their own, all at once."""
    common = {"ignore_eos": True, "detokenize": False} | common
    asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    return llm.generate(asked, [SamplingParams(**common | each) for each in params], use_tqdm=False)


def graph_runner(llm: LLM) -> Any:
    """The GraphRunner in the worker of an engine in this process."""
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    return executor.driver_worker.worker.model_runner.runner


@torch.no_grad()
def logits_after(model: Any, tokens: Sequence[int]) -> Tensor:
    logits: Tensor = model(torch.tensor([list(tokens)]), logits_to_keep=1).logits[0, -1].float()
    return logits


def choose_by(
    model: Any, prompt: Sequence[int], count: int, change: Callable[[Tensor, list[int]], Tensor]
) -> list[int]:
    """The best token at every step, by transformers' logits as `change(logits, generated)` changes them."""
    generated: list[int] = []
    for _ in range(count):
        generated.append(int(change(logits_after(model, [*prompt, *generated]), generated).argmax()))
    return generated
