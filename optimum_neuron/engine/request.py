# SPDX-License-Identifier: Apache-2.0
"""A request and how far it is. Knows nothing of steps, graphs or other requests; imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from numbers import Real
from typing import Any, Literal

import numpy as np

from ..runtime.token_ids import check_whole_numbers
from ..step.spec import GREEDY, SamplingParams


# An end token was chosen; all tokens asked for are there; the caller gave up.
FinishReason = Literal["stop", "length", "abort"]
_LARGEST_TOKEN = np.iinfo(np.int32).max


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """What a caller asks for. Two requests are equal only if they are the same object.

    Attributes:
        request_id: unique among the requests that are not finished.
        prompt_token_ids: int32 `[n]`, read-only; any sequence of whole numbers is accepted.
        max_new_tokens: most tokens to generate. None: as many as a slot of the cache holds.
        eos_token_ids: tokens that end the generation; the one chosen is returned as the last token.
        sampling: how the on-device sampler chooses.
        seed: makes sampling repeatable.
        priority: lower goes first.
        atomic: the prompt is taken in by a single step, because its tokens see later ones of the same prompt.
        processors: logits processors that choose tokens on the host; None leaves the choice to the device.
        do_sample: with `processors`, whether the host draws tokens instead of taking the best one.
        logprobs: whether the graphs tell the log-probability of each token that they choose, before sampling parameters.
        ends: given the generated tokens and the seconds since its first step began, says why the text ends there, or None.

    Raises:
        TypeError: the prompt, `eos_token_ids`, `max_new_tokens` or `priority` hold something other than whole numbers, or
            `sampling` is no SamplingParams of numbers.
        ValueError: the prompt is not one-dimensional, or a token is negative or beyond int32.
    """

    request_id: str
    prompt_token_ids: np.ndarray
    max_new_tokens: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    sampling: SamplingParams = GREEDY
    seed: int | None = None
    priority: int = 0
    atomic: bool = False
    processors: Any = None
    do_sample: bool = False
    logprobs: bool = False
    ends: Callable[[Sequence[int], float], FinishReason | None] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_token_ids", _read_only_tokens(self.request_id, self.prompt_token_ids))
        object.__setattr__(self, "eos_token_ids", frozenset(self._whole("eos_token_ids", self.eos_token_ids)))
        self._whole("max_new_tokens", () if self.max_new_tokens is None else (self.max_new_tokens,))
        self._whole("priority", (self.priority,))
        if not isinstance(self.sampling, SamplingParams) or not all(isinstance(each, Real) for each in self.sampling):
            raise TypeError(
                f"request {self.request_id!r} has sampling={self.sampling!r}; give SamplingParams of numbers"
            )

    def _whole(self, name: str, values: Collection[int]) -> Collection[int]:
        what = f"{name} of request {self.request_id!r}"
        if not isinstance(values, Collection) or isinstance(values, str):
            raise TypeError(f"{what} is {values!r}; give a set of token ids")
        check_whole_numbers(values, what)
        return values


def _read_only_tokens(request_id: str, token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
    given = np.asarray(token_ids)
    if given.ndim != 1:
        raise ValueError(
            f"the prompt of request {request_id!r} has shape {list(given.shape)}, not [tokens]; give one row of token ids"
        )
    if given.size and given.dtype.kind not in "iu":
        raise TypeError(f"the prompt of request {request_id!r} holds {given.dtype} values; give whole numbers")
    if given.size and not 0 <= int(given.min()) <= int(given.max()) <= _LARGEST_TOKEN:
        raise ValueError(
            f"the prompt of request {request_id!r} holds token ids from {given.min()} to {given.max()}; "
            f"they must lie between 0 and {_LARGEST_TOKEN}"
        )
    tokens = given.astype(np.int32)
    tokens.setflags(write=False)
    return tokens


class RequestStatus(Enum):
    """Where a request is: without a slot, taking in its tokens, generating, or gone."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class RequestState:
    """Progress of one request. The scheduler alone changes it.

    Attributes:
        arrival: number of the request in the order of arrival; tells it from a later one with the same id.
        max_new_tokens: the request's own, or what its slot holds.
        slot: row of the cache, from the first chunk on.
        tokens: int32 `[n]`, what it takes in before it generates: its prompt, and what it had generated when it was preempted.
        computed: of these, how many are in the cache, reused ones included.
        parts_at: where its chunks have a cut, as in `ScheduledChunk`.
        bypassed: steps in a row in which later prompts went before this one.
        preemptions: how often it was preempted.
        lost: the most tokens that it had in the cache when it was.
    """

    request: Request
    arrival: int
    max_new_tokens: int
    slot: int | None = None
    computed: int = 0
    parts_at: int = 0
    bypassed: int = 0
    preemptions: int = 0
    lost: int = 0
    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    tokens: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = self.request.prompt_token_ids

    @property
    def order(self) -> tuple[int, int]:
        """Who goes before whom: by priority, then by arrival."""
        return self.request.priority, self.arrival

    @property
    def remaining(self) -> int:
        """Of `tokens`, those that are not in the cache yet."""
        return len(self.tokens) - self.computed

    @property
    def atomic_tokens(self) -> int:
        """Tokens that the next chunk has to take in all at once; 0 where it may end anywhere."""
        return len(self.request.prompt_token_ids) if self.request.atomic and not self.computed else 0

    @property
    def cached(self) -> int:
        """Tokens in the cache, which is the place of the next one."""
        return self.computed if self.remaining else self.context - 1

    @property
    def context(self) -> int:
        """Cache columns that the next token to be fed back sees, its own included."""
        return len(self.request.prompt_token_ids) + len(self.output_token_ids)

    def preempt(self) -> None:
        """Has the request wait again, to be computed from its tokens."""
        self.lost = max(self.lost, self.cached)
        self.preemptions += 1
        self.tokens = np.concatenate([self.request.prompt_token_ids, np.asarray(self.output_token_ids, np.int32)])
        self.slot, self.computed, self.parts_at, self.status = None, 0, 0, RequestStatus.WAITING

    def append(self, token_id: int) -> FinishReason | None:
        """Adds a generated token and returns why the request ends with it, or None where it goes on.

        Raises:
            RuntimeError: the prompt is unfinished, so no token can follow it.
        """
        if self.remaining:
            raise RuntimeError(
                f"request {self.request.request_id!r} has {self.remaining} prompt tokens left and cannot take a token yet"
            )
        self.output_token_ids.append(token_id)
        if token_id in self.request.eos_token_ids:
            return "stop"
        return "length" if len(self.output_token_ids) >= self.max_new_tokens else None
