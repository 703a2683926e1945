# SPDX-License-Identifier: Apache-2.0
"""The answer to one HTTP request: requests to the engine, and the pieces of their texts as they come."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

from ...engine.events import RequestFailedError, TokenEvent
from ...engine.service import EngineStoppedError
from ...engine.stream import Item
from ...text.stream import Detokenizer, StopStrings
from .gate import Admission
from .http import ApiError, ClientGoneError, server_error
from .metrics import Metrics, Times
from .protocol import Asked, LoadedModel
from .tracing import Tracing


_SEEDS = 2**64
# Pieces of text that wait for a client to read; the engine makes no more for it then.
_MOST_UNREAD = 4096


@dataclass(slots=True)
class ScoredToken:
    """A token with its log-probability, and its characters in the text; `end` is None while they are not whole."""

    token_id: int
    logprob: float
    top: Sequence[tuple[int, float]]
    start: int
    end: int | None = None


class Piece(NamedTuple):
    """The next part of a choice for a client."""

    text: str
    scored: tuple[ScoredToken, ...] = ()  # whole in the text so far
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: str | int | None = None
    token_ids: tuple[int, ...] = ()  # since the last piece
    tokens: int = 0  # so far

    @property
    def is_first(self) -> bool:
        return self.tokens == len(self.token_ids)

    @property
    def is_empty(self) -> bool:
        return not self.text and not self.scored and self.finish_reason is None


class AnswerChoice:
    """The text of one request, cut before its first stop string or stop token. `logprobs`: most likely tokens for each one."""

    def __init__(
        self, tokenizer: Any, stops: Sequence[str], stop_token_ids: frozenset[int], logprobs: int | None
    ) -> None:
        self.tokens = 0
        self._detokenizer, self._stops = Detokenizer(tokenizer), StopStrings(stops)
        self._stop_token_ids, self._logprobs = stop_token_ids, logprobs
        self._scored: deque[ScoredToken] = deque()
        self._ids: list[int] = []  # not in a piece yet
        self._made = 0  # characters from the detokenizer
        self._out = 0  # characters of these that are out

    def take_token(self, event: TokenEvent) -> Piece:
        """Return the piece that follows from a token; it may be empty."""
        self.tokens += 1
        self._ids.append(event.token_id)
        piece = self._read_event(event)
        if piece.is_empty:
            return piece
        token_ids, self._ids = tuple(self._ids), []
        return piece._replace(token_ids=token_ids, tokens=self.tokens)

    def _read_event(self, event: TokenEvent) -> Piece:
        by_token = event.finish_reason == "stop"
        made = "" if by_token else self._detokenizer.push_token(event.token_id)
        if self._logprobs is not None:
            assert event.logprob is not None
            self._scored.append(ScoredToken(event.token_id, event.logprob, event.top[: self._logprobs], self._made))
            for token in self._scored if made else ():
                token.end = self._made + len(made) if token.end is None else token.end
        self._made += len(made)
        text = self._stops.push_text(made)
        if self._stops.found is None and event.finish_reason is not None:
            text += self._stops.push_text(self._detokenizer.take_rest(), is_last=True)
        self._out += len(text)
        if self._stops.found is not None:
            scored = [token for token in self._scored if token.start < self._out]
            return Piece(text, tuple(scored), "stop", self._stops.found)
        if event.finish_reason is None:
            scored = []
            # All of their text is out: others may turn out to be part of a stop string.
            while self._scored and self._scored[0].end is not None and self._scored[0].end <= self._out:
                scored.append(self._scored.popleft())
            return Piece(text, tuple(scored))
        stop_reason = event.token_id if by_token and event.token_id in self._stop_token_ids else None
        return Piece(text, tuple(self._scored), "stop" if by_token else "length", stop_reason)


class ServedAnswer:
    """`n` choices of each prompt, in the order of prompts. Only the event loop's thread uses it.

    A request leaves its admission in the moment in which the engine ends it, however slowly the client reads. The engine's
    names of requests begin with `name`; `arrived` is by `time.perf_counter()`, and spans continue from `headers`.
    """

    def __init__(
        self,
        served: LoadedModel,
        metrics: Metrics,
        admission: Admission,
        asked: Asked,
        prompts: Sequence[Sequence[int]],
        name: str,
        arrived: float,
        headers: Mapping[str, str],
        tracing: Tracing | None,
    ) -> None:
        self._prompt_tokens = sum(map(len, prompts))
        self._service, self._metrics = served.service, metrics
        self._loop = asyncio.get_running_loop()
        self._admission = admission
        self._open: set[int] = set()  # choices that the engine makes
        self._pieces: asyncio.Queue[tuple[int, Piece] | Exception | None] = asyncio.Queue()
        eos = frozenset() if asked.ignore_eos else served.requests.eos_token_ids
        self._requests = [
            served.requests.make_request(
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
        stops = asked.stop
        if stops is None:  # the file's end texts as its end tokens do
            stops = () if asked.ignore_eos else served.requests.stop_strings
        self._choices = [
            AnswerChoice(served.tokenizer, stops, asked.stop_token_ids, asked.logprobs) for _ in self._requests
        ]
        self._times = [Times(arrived) for _ in self._requests]
        self._headers, self._tracing, self._n = headers, tracing, asked.n

    def __len__(self) -> int:
        return len(self._choices)

    def count_usage(self, tokens: int | None = None) -> dict[str, int]:
        """Return OpenAI's counts after so many generated tokens, or all. A prompt counts once, however many choices it has."""
        if tokens is None:
            tokens = sum(choice.tokens for choice in self._choices)
        total = self._prompt_tokens + tokens
        return {"prompt_tokens": self._prompt_tokens, "completion_tokens": tokens, "total_tokens": total}

    def prompt_ids(self, index: int) -> list[int]:
        ids: list[int] = self._requests[index].prompt_token_ids.tolist()
        return ids

    def give_up(self) -> None:
        """End the answer of a client that is gone."""
        self._end_with(ClientGoneError(), "abort")

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """Yield the number of a choice and its next piece, until all have ended. Closed before that, it ends them. Raise ApiError where
        the engine refuses or fails or the client reads too slowly, ClientGoneError after `give_up`."""
        try:
            try:
                for index, request in enumerate(self._requests):
                    self._times[index].queued = time.perf_counter()
                    self._service.subscribe(request, partial(self._put_item, index))
                    self._open.add(index)
            except ValueError as error:
                raise ApiError(str(error)) from error
            except EngineStoppedError as error:
                raise server_error(str(error), status=503, code="engine_stopped") from error
            while (item := await self._pieces.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        except ApiError:
            self._abort_open("error")
            raise
        finally:
            self._abort_open("abort")

    def _abort_open(self, reason: str) -> None:
        for index in self._open:
            self._service.abort_request(self._requests[index].request_id)
            self._count_ended(index, reason, time.perf_counter())
        self._open.clear()
        self._admission.leave_all()

    def _end_with(self, error: Exception, reason: str) -> None:
        self._abort_open(reason)
        self._pieces.put_nowait(error)

    def _count_ended(self, index: int, reason: str, now: float) -> None:
        request, times, tokens = self._requests[index], self._times[index], self._choices[index].tokens
        self._metrics.count_ended(reason, len(request.prompt_token_ids), tokens, times, now)
        if self._tracing is not None:
            self._tracing.add_span(self._headers, request, self._n, times, tokens, reason)

    def _put_item(self, index: int, item: Item) -> None:
        self._loop.call_soon_threadsafe(self._take_item, index, item, time.perf_counter())

    def _take_item(self, index: int, item: Item, now: float) -> None:
        if index not in self._open:
            return  # a stop string has ended it, or the client is gone
        try:
            piece = self._make_piece(index, item, now)
        except Exception as error:  # `pieces` raises it
            self._end_with(error, "error")
            return
        if piece.finish_reason is not None:
            self._open.remove(index)
            self._admission.leave_one()
        if not piece.is_empty:
            self._pieces.put_nowait((index, piece))
        if not self._open:
            self._pieces.put_nowait(None)
        elif self._pieces.qsize() >= _MOST_UNREAD:
            slow = f"{_MOST_UNREAD:,} pieces of the answer are not read; read faster"
            self._end_with(ApiError(slow, status=408), "abort")

    def _make_piece(self, index: int, item: Item, now: float) -> Piece:
        choice, request, times = self._choices[index], self._requests[index], self._times[index]
        if isinstance(item, RequestFailedError):
            raise server_error(str(item), code="request_failed") from item
        if isinstance(item, EngineStoppedError):
            raise server_error(str(item), status=503, code="engine_stopped") from item
        if not isinstance(item, TokenEvent):
            if isinstance(item, BaseException):
                raise item
            raise server_error("the server ended before the answer did", status=503, code="draining")
        self._metrics.count_token(times, now, len(request.prompt_token_ids))
        if times.last is None:
            times.started, times.first = item.started, now
        times.last = now
        piece = choice.take_token(item)
        if piece.finish_reason is not None:
            self._count_ended(index, piece.finish_reason, now)
            if item.finish_reason is None:  # a stop string, which the engine does not know
                self._service.abort_request(request.request_id)
        return piece
