# SPDX-License-Identifier: Apache-2.0
"""One choice of an answer: the engine's tokens become the pieces that a client gets."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ...engine.events import TokenEvent
from ...text.stream import Detokenizer, StopStrings


@dataclass(slots=True)
class ScoredToken:
    """A token with its log-probability, and its characters in the text; `end` is None while they are not whole."""

    token_id: int
    logprob: float
    top: Sequence[tuple[int, float]]
    start: int
    end: int | None = None


class Piece(NamedTuple):
    """The next part of a choice for a client.

    Attributes:
        scored: tokens with log-probabilities that are whole in the text so far.
        token_ids: tokens since the last piece.
        tokens: number of tokens so far.
    """

    text: str
    scored: tuple[ScoredToken, ...] = ()
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: str | int | None = None
    token_ids: tuple[int, ...] = ()
    tokens: int = 0

    @property
    def is_first(self) -> bool:
        return self.tokens == len(self.token_ids)

    @property
    def is_empty(self) -> bool:
        return not self.text and not self.scored and self.finish_reason is None


class AnswerChoice:
    """The text of one request, cut before its first stop string or stop token.

    Args:
        stop_token_ids: tokens that may end it, as the client named them.
        logprobs: number of most likely tokens for each token; None: no log-probabilities.

    Attributes:
        tokens: number of tokens so far.
    """

    def __init__(
        self, tokenizer: Any, stops: Sequence[str], stop_token_ids: frozenset[int], logprobs: int | None
    ) -> None:
        self.tokens = 0
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stops)
        self._stop_token_ids = stop_token_ids
        self._logprobs = logprobs
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
