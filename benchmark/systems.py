# SPDX-License-Identifier: Apache-2.0
"""Systems with transformers' `generate`, and how a call is timed; transformers' continuous batching; random prompts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from optimum_neuron import progress
from optimum_neuron.generate.model import NeuronModelForCausalLM


OURS = "optimum_neuron"
PAGE_TOKENS = 128


@dataclass
class System:
    """Something with transformers' `generate`, and the options with which it is called."""

    name: str
    model: Any
    options: dict[str, Any] = field(default_factory=dict)

    def generate(self, prompts: Tensor, new_tokens: int, streamer: BaseStreamer | None = None) -> Tensor:
        """Return the greedy `[rows, new_tokens]` after prompts `[rows, length]`, which nothing ends early."""
        sequences = self.model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),  # else transformers guesses padding from random tokens
            max_new_tokens=new_tokens,
            eos_token_id=None,
            do_sample=False,
            streamer=streamer,
            **self.options,
        )
        generated: Tensor = sequences[:, prompts.shape[1] :]
        if generated.shape[1] != new_tokens:
            raise RuntimeError(f"{self.name} generated {generated.shape[1]} tokens, not {new_tokens}")
        return generated


@dataclass(frozen=True)
class Call:
    """One call of generate: seconds to the first token, seconds per further token, 0 where there is none, `[rows, new_tokens]`."""

    first_token: float
    step: float
    tokens: Tensor


class Clock(BaseStreamer):
    """Arrival times of tokens: generate() puts the prompt first, then the tokens of each step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to show."""


def timed_call(system: System, prompts: Tensor, new_tokens: int) -> Call:
    """Time one call through a streamer."""
    clock = Clock()
    start = time.perf_counter()
    tokens = system.generate(prompts, new_tokens, clock)
    arrived = clock.times[1:]
    if len(arrived) != new_tokens:
        raise RuntimeError(f"{system.name} streamed {len(arrived)} steps for {new_tokens} new tokens")
    return Call(arrived[0] - start, (arrived[-1] - arrived[0]) / max(1, new_tokens - 1), tokens)


def load_ours(path: Path) -> System:
    """Load this runtime's system over an exported artifact."""
    with progress.stage("Loading the artifact"):
        return System(OURS, NeuronModelForCausalLM.from_pretrained(path))


@contextmanager
def continuous_batching(model: Any, step_tokens: int, slots: int, cache_tokens: int) -> Iterator[Any]:
    """Yield the running manager of transformers' continuous batching; it ends with the block.

    Args:
        step_tokens: of a step, decodes and prompts together.
        slots: requests at a time.
        cache_tokens: that its cache holds.
    """
    config = ContinuousBatchingConfig(
        max_batch_tokens=step_tokens,
        page_size=PAGE_TOKENS,
        num_blocks=-(-cache_tokens // PAGE_TOKENS) + slots,
        max_requests_per_batch=slots,
        allow_block_sharing=False,
    )
    generation = GenerationConfig(max_new_tokens=1, do_sample=False, eos_token_id=-1)
    manager = model.init_continuous_batching(generation, continuous_batching_config=config)
    manager.start()
    try:
        yield manager
    finally:
        manager.stop(block=True)


def next_output(manager: Any) -> Any:
    """Return the next output of continuous batching, or None after a moment; raise RuntimeError where it failed."""
    output = manager.get_result(timeout=0.002)
    if output is None and not manager.is_running():
        raise RuntimeError("transformers' continuous batching stopped; see its log")
    if output is not None and output.error is not None:
        raise RuntimeError(f"transformers failed request {output.request_id}: {output.error}")
    return output


class PromptSource:
    """Random token ids, never the same twice, so that no cache of prefixes can help."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._vocab_size = vocab_size
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self, rows: int, length: int) -> Tensor:
        return torch.randint(0, self._vocab_size, (rows, length), generator=self._generator)
