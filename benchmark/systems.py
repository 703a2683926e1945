# SPDX-License-Identifier: Apache-2.0
"""Systems with transformers' `generate`, this runtime's artifact and transformers on the same checkpoint, and how a call is timed."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import CompileConfig
from transformers.generation.streamers import BaseStreamer

from optimum_neuron import progress
from optimum_neuron.config import NeuronConfig
from optimum_neuron.generate import NeuronModelForCausalLM

from .model import load_transformers


OURS = "optimum_neuron"
SMALL_CHUNK = 128


@dataclass
class System:
    """Something with transformers' `generate`, and the options with which it is called.

    Attributes:
        compiles: its first call for new shapes compiles.
    """

    name: str
    model: Any
    options: dict[str, Any] = field(default_factory=dict)
    compiles: bool = False

    def generate(self, prompts: Tensor, new_tokens: int, streamer: BaseStreamer | None = None) -> Tensor:
        """Greedy search that nothing ends early: `[rows, new_tokens]` from prompts `[rows, length]`."""
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

    def forget_shapes(self) -> None:
        """Makes a compiling peer start afresh: a cache of this case's own size, and no recompilation limit in reach.

        In one long process it would keep the largest cache so far, and slow down by dynamic shapes.
        """
        if self.compiles:
            torch._dynamo.reset()
            for name in ("_compiled_call", "_previous_max_cache_length"):
                self.model.__dict__.pop(name, None)


@dataclass(frozen=True)
class Call:
    """One call of generate: seconds to the first token, seconds per further token, 0 where there is none, `[rows, new_tokens]`."""

    first_token: float
    step: float
    tokens: Tensor


class Clock(BaseStreamer):
    """Notes when tokens arrive: generate() puts the prompt first, then the tokens of each step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to show."""


def timed_call(system: System, prompts: Tensor, new_tokens: int) -> Call:
    """Times one call through a streamer."""
    clock = Clock()
    start = time.perf_counter()
    tokens = system.generate(prompts, new_tokens, clock)
    arrived = clock.times[1:]
    if len(arrived) != new_tokens:
        raise RuntimeError(f"{system.name} streamed {len(arrived)} steps for {new_tokens} new tokens")
    return Call(arrived[0] - start, (arrived[-1] - arrived[0]) / max(1, new_tokens - 1), tokens)


def compiled_frames() -> int:
    """How many graphs torch.compile has made in this process."""
    return int(counters["stats"]["unique_graphs"])


def load_peers(model: str, dtype: str, names: list[str]) -> list[System]:
    """The transformers systems, over one copy of the checkpoint."""
    if not names:
        return []
    loaded = load_transformers(model, dtype)
    made = {"eager": System("eager", loaded), "static": _static_peer(loaded)}
    return [made[name] for name in names]


def _static_peer(model: Any) -> System:
    compile_config = CompileConfig()
    # On the CPU generate() skips compilation without this, even when it is given a compile_config.
    compile_config._compile_all_devices = True
    options = {"cache_implementation": "static", "compile_config": compile_config}
    return System("static", model, options, compiles=True)


def artifact_config(dtype: str, target: str, batch_size: int, longest: int) -> NeuronConfig:
    """Sizes that hold `longest` tokens: one context length, chunks of up to 512 tokens and of 128."""
    length = -(-longest // 256) * 256
    config = NeuronConfig(
        batch_size=batch_size,
        sequence_length=length,
        mixed_step=False,  # generate() takes in all prompts first
        context_buckets=(length,),
        dtype=dtype,
        target=target,
    )
    assert config.prefill_chunk_size is not None
    return replace(config, prefill_chunk_buckets=(SMALL_CHUNK,)) if config.prefill_chunk_size > SMALL_CHUNK else config


def load_ours(path: Path) -> System:
    """This runtime's system over an exported artifact."""
    with progress.stage("Loading the artifact"):
        return System(OURS, NeuronModelForCausalLM.from_pretrained(path))
