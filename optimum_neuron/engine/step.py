# SPDX-License-Identifier: Apache-2.0
"""One step as plain data: what one run of a graph advances. Knows nothing of queues, tensors or devices."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import NamedTuple

from ..step.spec import GraphSpec
from .request import FinishReason


class PrefixReuse(NamedTuple):
    """The first `length` tokens of a prompt are in the cache rows of `source_slot`, and the state behind them in `snapshot`.

    Where that is the chunk's own slot they are in place; otherwise they are copied before the step runs. In a cache of blocks
    it is None: the blocks that the step assigns contain them, once its copies are made. The snapshot is None where slots keep no
    state beside keys and values.
    """

    source_slot: int | None
    length: int
    snapshot: int | None = None


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Tokens `[start, start + count)` of one request: of its prompt, and, where it was preempted, of what it had generated.

    Attributes:
        is_first: the request takes its slot with this chunk; the slot's former contents are void beyond `reuse`.
        is_last: these tokens end here, and the chunk's token is the next generated one.
        reuse: cache rows that hold the prompt up to `start`; only ever in a first chunk.
        arrival: the request's, so that a later request with the same id is not mistaken for it.
        generated: tokens that the request got before.
        preemptions: how often it was preempted before.
        recomputed: tokens of the chunk that were in the cache before it was.
        parts_at: where the request's chunks have a cut, as its tokens part there from others that were computed before; 0: nowhere.
    """

    request_id: str
    slot: int
    start: int
    count: int
    is_first: bool
    is_last: bool
    reuse: PrefixReuse | None
    arrival: int
    generated: int = 0
    preemptions: int = 0
    recomputed: int = 0
    parts_at: int = 0


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


class Preempted(NamedTuple):
    """A request that gives its row and its blocks back and is computed again later; `arrival` as in `ScheduledChunk`."""

    request_id: str
    slot: int
    arrival: int


class Assignment(NamedTuple):
    """Blocks for the tokens of a row from its block `first` on; `arrival` as in `ScheduledChunk`.

    The first `shared` of them contain tokens of the row already, and are only read, by other rows too.
    """

    request_id: str
    slot: int
    first: int
    blocks: tuple[int, ...]
    shared: int
    arrival: int


class KeptState(NamedTuple):
    """The state of a slot, of the first `length` tokens of its request, is copied to a snapshot's place; `arrival` as in
    `ScheduledChunk`."""

    request_id: str
    slot: int
    length: int
    place: int
    arrival: int


class BlockCopy(NamedTuple):
    """The first `length` tokens of a block are copied into another."""

    source: int
    destination: int
    length: int


class Step(NamedTuple):
    """What one graph run does; what is done before it: requests are preempted, then blocks assigned, then copies made, and state
    taken from snapshots; and what behind it: state is kept.

    The copies of reused prefixes are made in the order of `chunks`, or of `copies`: a later one may overwrite what an earlier
    one copies from.

    Attributes:
        graph: what the step runs in. A chunk with a larger count than `graph.chunk_size` takes several rows.
        decodes: in the order of their slots.
        passed_over: the prompt that this step passed over, if it did.
        preempted, assignments, copies: of a cache of blocks.
        kept: of slots that keep state beside keys and values.
    """

    graph: GraphSpec
    decodes: tuple[ScheduledDecode, ...]
    chunks: tuple[ScheduledChunk, ...]
    passed_over: PassedOver | None = None
    preempted: tuple[Preempted, ...] = ()
    assignments: tuple[Assignment, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    kept: tuple[KeptState, ...] = ()


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
    """A generated token, and why the request ended where it did.

    Attributes:
        logprob: of tokens that the host chose, and where the request asked for it.
        top: where the request asked and the graphs chose, the most likely tokens with their log-probabilities, the best first:
            as many as the artifact's `top_logprobs`.
        started: of a request's first token, `time.perf_counter()` when its first chunk began.
    """

    request_id: str
    token_id: int
    finish_reason: FinishReason | None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    started: float | None = None


# What a step has for a caller.
Event = TokenEvent | RequestFailure
