# SPDX-License-Identifier: Apache-2.0
"""The answer to one HTTP request: its requests to the engine, and the pieces of their texts as they come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial

import numpy as np

from ..engine.request import Request
from ..engine.service import EngineStoppedError
from ..engine.step import RequestFailedError, TokenEvent
from ..engine.stream import Item
from .choice import Choice, Piece
from .errors import ApiError, ClientGoneError, failed
from .gate import Admission
from .metrics import Metrics
from .protocol import Asked
from .served_model import ServedModel
from .tracing import Times, Tracing


_SEEDS = 2**64


class Answer:
    """`n` choices of each prompt, in the order of prompts.

    Args:
        name: begins the engine's names of its requests.
        arrived: `time.perf_counter()` when the HTTP request came.
        headers: of it.
        tracing: gets a span of each request.

    Attributes:
        prompt_tokens: of all prompts; each counts once, however many choices it has.
    """

    def __init__(
        self,
        served: ServedModel,
        metrics: Metrics,
        asked: Asked,
        prompts: Sequence[Sequence[int]],
        name: str,
        arrived: float,
        headers: Mapping[str, str],
        tracing: Tracing | None,
    ) -> None:
        self.prompt_tokens = sum(map(len, prompts))
        self._service, self._metrics = served.service, metrics
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[tuple[int, Item | ClientGoneError, float]] = asyncio.Queue()
        eos = frozenset() if asked.ignore_eos else served.eos_token_ids
        self._requests = [
            served.requests.make(
                f"{name}-{prompt * asked.n + copy}",
                np.asarray(ids, dtype=np.int32),
                asked.max_tokens,
                eos | asked.stop_token_ids,
                sampling=asked.sampling,
                # The second choice has the next seed.
                seed=None if asked.seed is None else (asked.seed + copy) % _SEEDS,
                logprobs=asked.logprobs is not None,
            )
            for prompt, ids in enumerate(prompts)
            for copy in range(asked.n)
        ]
        self._choices = [
            Choice(served.tokenizer, asked.stop, asked.stop_token_ids, asked.logprobs) for _ in self._requests
        ]
        self._times = [Times(arrived) for _ in self._requests]
        self._arrived, self._headers, self._tracing, self._n = arrived, headers, tracing, asked.n

    def __len__(self) -> int:
        return len(self._choices)

    @property
    def usage(self) -> dict[str, int]:
        """OpenAI's counts."""
        generated = sum(choice.tokens for choice in self._choices)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": self.prompt_tokens + generated,
        }

    def give_up(self) -> None:
        """The client is gone."""
        self._items.put_nowait((0, ClientGoneError(), time.perf_counter()))

    async def pieces(self, admission: Admission) -> AsyncGenerator[tuple[int, Piece], None]:
        """The number of a choice and its next piece, until all have ended. Closed before that, it ends them.

        Raises:
            ApiError: the engine refused or failed.
            ClientGoneError: after `give_up`.
        """
        open_ones: set[int] = set()
        reason = "abort"
        try:
            for index, request in enumerate(self._requests):
                self._subscribe(index, request)
                open_ones.add(index)
            while open_ones:
                index, item, now = await self._items.get()
                if index not in open_ones and not isinstance(item, ClientGoneError):
                    continue  # a stop string has ended it
                piece = self._piece(index, self._token(item), now)
                if piece.finish_reason is not None:
                    open_ones.remove(index)
                    admission.leave()
                if not piece.is_empty:
                    yield index, piece
        except ApiError:
            reason = "error"
            raise
        finally:
            for index in open_ones:
                self._service.abort(self._requests[index].request_id)
                self._ended(index, reason, time.perf_counter())

    def _ended(self, index: int, reason: str, now: float) -> None:
        self._metrics.ended(reason, now - self._arrived)
        if self._tracing is not None:
            tokens = self._choices[index].tokens
            self._tracing.ended(self._headers, self._requests[index], self._n, self._times[index], tokens, reason)

    def _subscribe(self, index: int, request: Request) -> None:
        self._times[index].queued = time.perf_counter()
        try:
            self._service.subscribe(request, partial(self._put, index))
        except ValueError as error:
            raise ApiError(str(error)) from error
        except EngineStoppedError as error:
            raise failed(str(error), status=503, code="engine_stopped") from error

    def _put(self, index: int, item: Item) -> None:
        """Called by the engine's thread."""
        self._loop.call_soon_threadsafe(self._items.put_nowait, (index, item, time.perf_counter()))

    def _token(self, item: Item | ClientGoneError) -> TokenEvent:
        if isinstance(item, TokenEvent):
            return item
        if isinstance(item, RequestFailedError):
            raise failed(str(item), code="request_failed") from item
        if isinstance(item, EngineStoppedError):
            raise failed(str(item), status=503, code="engine_stopped") from item
        if isinstance(item, BaseException):
            raise item
        raise failed("the server ended before the answer did", status=503, code="draining")

    def _piece(self, index: int, event: TokenEvent, now: float) -> Piece:
        choice, request, times = self._choices[index], self._requests[index], self._times[index]
        if times.last is not None:
            self._metrics.next_token(now - times.last)
        else:
            self._metrics.first_token(now - self._arrived, len(request.prompt_token_ids))
            times.started, times.first = event.started, now
        times.last = now
        piece = choice.take(event)
        if piece.finish_reason is not None:
            self._ended(index, piece.finish_reason, now)
            if event.finish_reason is None:  # a stop string, of which the engine knows nothing
                self._service.abort(request.request_id)
        return piece
