# SPDX-License-Identifier: Apache-2.0
"""The progress of a request, and whether it can be served at all. Knows nothing of other requests; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from ..config import NeuronConfig
from ..core import FinishReason, Request
from ..runtime.lengths import check_length


class RequestStatus(Enum):
    """Where a request is: without a row, taking in its tokens, generating, or gone."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class RequestState:
    """The progress of one request. Only the scheduler changes it.

    Attributes:
        arrival: number of the request in the order of arrival; distinguishes it from a later one with the same id.
        max_new_tokens: the request's own, or what its row holds.
        slot: row of the cache, from the first piece on.
        tokens: int32 `[n]`, what it takes in before it generates: its prompt, and what it had generated when it was preempted.
        computed: how many of these are in the cache, reused ones included.
        cut: where its pieces have a cut, as in `PromptPiece`.
        bypassed: steps in a row in which later prompts went before this one.
        lost: the most tokens that it had in the cache when it was preempted.
    """

    request: Request
    arrival: int
    max_new_tokens: int
    slot: int | None = None
    computed: int = 0
    cut: int = 0
    bypassed: int = 0
    lost: int = 0
    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    tokens: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = self.request.prompt_token_ids

    @property
    def order(self) -> tuple[int, int]:
        """Priority, then arrival: the lower one goes first."""
        return self.request.priority, self.arrival

    @property
    def remaining(self) -> int:
        """Number of `tokens` that are not in the cache yet."""
        return len(self.tokens) - self.computed

    @property
    def atomic_tokens(self) -> int:
        """Tokens that the next piece has to take in all at once; 0 where it may end anywhere."""
        return len(self.request.prompt_token_ids) if self.request.atomic and not self.computed else 0

    @property
    def cached(self) -> int:
        """Tokens in the cache, which is the place of the next one."""
        return self.computed if self.remaining else self.context - 1

    @property
    def context(self) -> int:
        """Cache columns that the next token to be fed back sees, its own included."""
        return len(self.request.prompt_token_ids) + len(self.output_token_ids)

    def restart(self) -> None:
        """Make a preempted request wait again, to be computed from its tokens."""
        self.lost = max(self.lost, self.cached)
        self.tokens = np.concatenate([self.request.prompt_token_ids, np.asarray(self.output_token_ids, np.int32)])
        self.slot, self.computed, self.cut, self.status = None, 0, 0, RequestStatus.WAITING

    def append_token(self, token_id: int) -> FinishReason | None:
        """Add a generated token; return why the request ends with it, or None where it continues.

        Raises:
            RuntimeError: the prompt is unfinished, so no token can follow it.
        """
        if self.computed < len(self.tokens):
            raise RuntimeError(
                f"request {self.request.request_id!r} has {self.remaining} prompt tokens left and cannot take a token yet"
            )
        self.output_token_ids.append(token_id)
        if token_id in self.request.eos_token_ids:
            return "stop"
        return "length" if len(self.output_token_ids) >= self.max_new_tokens else None


def check_admission(request: Request, config: NeuronConfig, *, largest_step: int, most_decodes: int) -> int:
    """Return how many tokens a request gets at most.

    Args:
        largest_step: tokens of a step, decodes and prompt tokens together.
        most_decodes: decodes that a step with a prompt may hold.

    Raises:
        ValueError: no step or no row could ever hold the request.
    """
    who, prompt = f"request {request.request_id!r}", len(request.prompt_token_ids)
    most = check_length(prompt, request.max_new_tokens, config, f"the prompt of {who}")
    if not request.atomic:
        return most
    capacity, budget = config.prompt_capacity, largest_step - most_decodes
    if prompt > capacity:
        raise ValueError(
            f"{who} is atomic with {prompt} prompt tokens, but one step takes in at most ctx_batch_size * prefill_chunk_size = "
            f"{config.ctx_batch_size} * {config.prefill_chunk_size} = {capacity}; export with a larger prefill_chunk_size"
        )
    if prompt > budget:
        raise ValueError(
            f"{who} is atomic with {prompt} prompt tokens, but max_step_tokens leaves {budget} for prompts while the other "
            f"slots decode; raise max_step_tokens by {prompt - budget}"
        )
    return most
