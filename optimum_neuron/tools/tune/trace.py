# SPDX-License-Identifier: Apache-2.0
"""A trace: which requests came when, and how long they were. What files hold of it is read in trace_formats.py; needs no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...config import NeuronConfig
from ...engine.request import Request


# No model of a trace is known: ids below this are drawn where nothing computes with them.
VOCABULARY = 32_000
# What a sequence length that nobody chose is a multiple of.
_LENGTH_STEP = 256


class SharedPart(NamedTuple):
    """Tokens of a prompt that are those of every other prompt that has the same key in the same place."""

    key: str
    tokens: int


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request of a trace.

    Attributes:
        arrival: seconds from the first one.
        prompt_tokens, new_tokens: at least one each.
        shared: what its prompt begins with, part by part; its other tokens are its own.
        source: where it stands, as file:line.
    """

    arrival: float
    prompt_tokens: int
    new_tokens: int
    shared: tuple[SharedPart, ...] = ()
    source: str = ""

    @property
    def tokens(self) -> int:
        """Places of the cache that it takes: its last token is never fed back."""
        return self.prompt_tokens + self.new_tokens - 1


@dataclass(frozen=True)
class Trace:
    """Requests in the order of their arrival, the first one at 0."""

    requests: tuple[TracedRequest, ...]
    name: str

    @classmethod
    def of(cls, requests: Sequence[TracedRequest], name: str) -> Trace:
        """Sort requests by their arrival; raise ValueError where there are none."""
        if not requests:
            raise ValueError(f"{name} holds no requests; give a line for each")
        ordered = sorted(requests, key=lambda request: request.arrival)
        first = ordered[0].arrival
        return cls(
            tuple(
                TracedRequest(each.arrival - first, each.prompt_tokens, each.new_tokens, each.shared, each.source)
                for each in ordered
            ),
            name,
        )

    def first(self, count: int) -> Trace:
        return Trace(self.requests[:count], self.name)

    @property
    def seconds(self) -> float:
        return self.requests[-1].arrival

    @property
    def shares_prefixes(self) -> bool:
        """Whether any two prompts start alike."""
        firsts = [request.shared[0].key for request in self.requests if request.shared]
        return len(set(firsts)) < len(firsts)

    @property
    def sequence_length(self) -> int:
        """The least multiple of 256 that holds every request."""
        longest = max(request.tokens for request in self.requests)
        return -(-longest // _LENGTH_STEP) * _LENGTH_STEP

    def check_length(self, sequence_length: int) -> None:
        """Raises ValueError, with the first request that does not fit."""
        for request in self.requests:
            if request.tokens > sequence_length:
                raise ValueError(
                    f"{request.source}: {request.prompt_tokens} prompt tokens and {request.new_tokens} new ones do not fit "
                    f"--sequence-length {sequence_length}; raise it to {request.tokens} or more, or take the request out of the trace"
                )

    def prompts(self, vocab_size: int = VOCABULARY, seed: int = 0) -> list[np.ndarray]:
        """Token ids of each prompt, int32: random, but for what prompts share. The same whatever serves them."""
        return [self._prompt(request, number, vocab_size, seed) for number, request in enumerate(self.requests)]

    def _prompt(self, request: TracedRequest, number: int, vocab_size: int, seed: int) -> np.ndarray:
        parts = [_draw(part.tokens, vocab_size, f"{seed}/shared/{part.key}") for part in request.shared]
        own = request.prompt_tokens - sum(part.tokens for part in request.shared)
        return np.concatenate([*parts, _draw(own, vocab_size, f"{seed}/own/{number}")])


def _draw(count: int, vocab_size: int, key: str) -> np.ndarray:
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")
    return np.random.default_rng(seed).integers(0, vocab_size, count).astype(np.int32)


def traced_request(trace: Trace, prompts: Sequence[np.ndarray], number: int) -> Request:
    """One request of a trace, as an engine takes it; its id is its number."""
    new_tokens = trace.requests[number].new_tokens
    return Request(request_id=str(number), prompt_token_ids=prompts[number], max_new_tokens=new_tokens)


def least_chunk_steps(trace: Trace, config: NeuronConfig) -> list[int]:
    """Steps that each request's prompt takes at least, whoever else is there; one where prompts may be shared."""
    if trace.shares_prefixes:
        return [1] * len(trace.requests)
    return [-(-request.prompt_tokens // config.prompt_capacity) for request in trace.requests]
