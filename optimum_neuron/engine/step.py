# SPDX-License-Identifier: Apache-2.0
"""One step as plain data: what one run of a graph advances. Knows nothing of queues, tensors or devices."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import NamedTuple

from ..graphs.spec import GraphSpec
from .request import FinishReason


class PrefixReuse(NamedTuple):
    """The first `length` tokens of a prompt are in the cache rows of `source_slot`.

    Where that is the chunk's own slot they are in place; otherwise they are copied before the step runs.
    """

    source_slot: int
    length: int


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Prompt tokens `[start, start + count)` of one request.

    Attributes:
        is_first: the request takes its slot with this chunk; the slot's former contents are void beyond `reuse`.
        is_last: the prompt ends here, and the chunk's token is the first generated one.
        reuse: cache rows that hold the prompt up to `start`; only ever in a first chunk.
        arrival: the request's, so that a later request with the same id is not mistaken for it.
    """

    request_id: str
    slot: int
    start: int
    count: int
    is_first: bool
    is_last: bool
    reuse: PrefixReuse | None
    arrival: int


@dataclass(frozen=True, slots=True)
class ScheduledDecode:
    """One token of a request whose prompt is complete; `arrival` as in `ScheduledChunk`."""

    request_id: str
    slot: int
    arrival: int


class PassedOver(NamedTuple):
    """A prompt that was due and got nothing, because shorter ones went before it; `arrival` as in `ScheduledChunk`."""

    request_id: str
    arrival: int


@dataclass(frozen=True, slots=True)
class Step:
    """What one graph run does.

    The copies of reused prefixes are made before the graph runs and in the order of `chunks`: a later chunk may take
    the slot that an earlier one copies from.

    Attributes:
        graph: what the step runs in. A chunk with a larger count than `graph.chunk_size` takes several rows.
        decodes: in the order of their slots.
        passed_over: the prompt that this step passed over, if it did.
    """

    graph: GraphSpec
    decodes: tuple[ScheduledDecode, ...]
    chunks: tuple[ScheduledChunk, ...]
    passed_over: PassedOver | None = None


class RequestFailedError(RuntimeError):
    """A request ended by a fault of its own, which `__cause__` is; others are not affected."""

    def __init__(self, request_id: str, what: str, cause: BaseException) -> None:
        # Python's own words for it: the exception's may raise.
        why = "".join(traceback.format_exception_only(cause)).strip()
        super().__init__(f"request {request_id!r} failed: {what}: {why}")
        self.__cause__ = cause


class RequestFailure(NamedTuple):
    """The end of a request that failed by itself, in place of a token."""

    request_id: str
    error: RequestFailedError


class TokenEvent(NamedTuple):
    """A generated token, and why the request ended where it did; `logprob` only of tokens that the host chose."""

    request_id: str
    token_id: int
    finish_reason: FinishReason | None
    logprob: float | None = None


# What a step has for a caller.
Event = TokenEvent | RequestFailure
