# SPDX-License-Identifier: Apache-2.0
"""The events of a step that callers get: a token of a request, or its failure."""

from __future__ import annotations

import traceback
from typing import NamedTuple

from ..core import FinishReason


class RequestFailedError(RuntimeError):
    """The end of a request by a fault of its own, which is `__cause__`; other requests are not affected."""

    def __init__(self, request_id: str, what: str, cause: BaseException) -> None:
        # In Python's own words: the exception's may raise.
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
        started: `time.perf_counter()` when the request's first piece began; of its first token only.
    """

    request_id: str
    token_id: int
    finish_reason: FinishReason | None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    started: float | None = None


Event = TokenEvent | RequestFailure
