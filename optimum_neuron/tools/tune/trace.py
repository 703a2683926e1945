# SPDX-License-Identifier: Apache-2.0
"""A trace: the arrivals and lengths of requests. trace_formats.py reads the files; needs no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ...core import Request


# No model of a trace is known: ids below this are drawn where nothing computes with them.
VOCABULARY = 32_000
# A default sequence length is a multiple of this.
_LENGTH_STEP = 256


class SharedPart(NamedTuple):
    """Tokens of a prompt that equal those of every other prompt with the same key in the same place."""

    key: str
    tokens: int


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request of a trace.

    Attributes:
        arrival: seconds from the first one.
        prompt_tokens, new_tokens: at least one each.
        shared: the beginning of its prompt, part by part; its other tokens are its own.
        source: its place, as file:line.
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
class RequestTrace:
    """Requests in the order of their arrival, the first one at 0."""

    requests: tuple[TracedRequest, ...]
    name: str

    @classmethod
    def from_requests(cls, requests: Sequence[TracedRequest], name: str) -> RequestTrace:
        """Sort requests by their arrival; raise ValueError where there are none."""
        if not requests:
            raise ValueError(f"{name} holds no requests; give a line for each")
        ordered = sorted(requests, key=lambda request: request.arrival)
        return cls(tuple(replace(each, arrival=each.arrival - ordered[0].arrival) for each in ordered), name)

    def first_requests(self, count: int) -> RequestTrace:
        """Return a trace of the requests that come first."""
        return RequestTrace(self.requests[:count], self.name)

    @property
    def seconds(self) -> float:
        return self.requests[-1].arrival

    @property
    def shares_prefixes(self) -> bool:
        """True where two prompts start alike."""
        firsts = [request.shared[0].key for request in self.requests if request.shared]
        return len(set(firsts)) < len(firsts)

    @property
    def sequence_length(self) -> int:
        """The least multiple of 256 that holds every request."""
        longest = max(request.tokens for request in self.requests)
        return -(-longest // _LENGTH_STEP) * _LENGTH_STEP

    def check_length(self, sequence_length: int) -> None:
        """Raise ValueError with the first request that does not fit."""
        for request in self.requests:
            if request.tokens > sequence_length:
                raise ValueError(
                    f"{request.source}: {request.prompt_tokens} prompt tokens and {request.new_tokens} new ones do not fit "
                    f"--sequence-length {sequence_length}; raise it to {request.tokens} or more, or take the request out of the trace"
                )

    def draw_prompts(self, vocab_size: int = VOCABULARY, seed: int = 0) -> list[np.ndarray]:
        """Return token ids of each prompt, int32: random but for shared parts, and the same for every server."""
        prompts = []
        for number, request in enumerate(self.requests):
            own = request.prompt_tokens - sum(part.tokens for part in request.shared)
            keys = [(f"shared/{part.key}", part.tokens) for part in request.shared]
            parts = [
                _draw_tokens(count, vocab_size, f"{seed}/{key}") for key, count in [*keys, (f"own/{number}", own)]
            ]
            prompts.append(np.concatenate(parts))
        return prompts


def _draw_tokens(count: int, vocab_size: int, key: str) -> np.ndarray:
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")
    return np.random.default_rng(seed).integers(0, vocab_size, count).astype(np.int32)


def traced_request(trace: RequestTrace, prompts: Sequence[np.ndarray], number: int) -> Request:
    """Return one request of a trace for an engine; its id is its number."""
    new_tokens = trace.requests[number].new_tokens
    return Request(request_id=str(number), prompt_token_ids=prompts[number], max_new_tokens=new_tokens)
