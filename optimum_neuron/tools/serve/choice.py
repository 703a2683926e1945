# SPDX-License-Identifier: Apache-2.0
"""One choice of an answer: from the engine's tokens to the pieces that a client gets."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ...engine.step import TokenEvent
from .detokenizer import Detokenizer
from .stop_strings import StopStrings


Ending = Literal["stop", "length"]


@dataclass(slots=True)
class ToldToken:
    """A token whose log-probability is wanted.

    Attributes:
        start, end: its characters in the text; `end` is None while they are not whole.
    """

    token_id: int
    logprob: float
    top: Sequence[tuple[int, float]]
    start: int
    end: int | None = None


class Piece(NamedTuple):
    """What a client gets next.

    Attributes:
        text: of the choice.
        told: tokens with log-probabilities, that it ends with.
        finish_reason, stop_reason: why the choice ends where it does.
        token_ids: all that came since the last piece.
        tokens: how many came since the first.
    """

    text: str
    told: tuple[ToldToken, ...] = ()
    finish_reason: Ending | None = None
    stop_reason: str | int | None = None
    token_ids: tuple[int, ...] = ()
    tokens: int = 0

    @property
    def is_first(self) -> bool:
        """Whether the choice had none before."""
        return self.tokens == len(self.token_ids)

    @property
    def is_empty(self) -> bool:
        return not self.text and not self.told and self.finish_reason is None


class Choice:
    """The text of one request, cut before its first stop string or stop token.

    Args:
        stop_token_ids: of the tokens that may end it, those that the client named.
        logprobs: how many of the most likely tokens are told of each; None: nothing is told.

    Attributes:
        tokens: how many came.
        finish_reason: why it ended; None while it has not.
    """

    def __init__(
        self, tokenizer: Any, stops: Sequence[str], stop_token_ids: frozenset[int], logprobs: int | None
    ) -> None:
        self.tokens = 0
        self.finish_reason: Ending | None = None
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stops)
        self._stop_token_ids = stop_token_ids
        self._logprobs = logprobs
        self._told: deque[ToldToken] = deque()
        self._ids: list[int] = []  # that no piece had
        self._made = 0  # characters that the detokenizer gave
        self._out = 0  # of these, what is out

    def take(self, event: TokenEvent) -> Piece:
        """The piece that follows from a token; it may be empty."""
        self.tokens += 1
        self._ids.append(event.token_id)
        piece = self._read(event)
        if piece.is_empty:
            return piece
        token_ids, self._ids = tuple(self._ids), []
        return piece._replace(token_ids=token_ids, tokens=self.tokens)

    def _read(self, event: TokenEvent) -> Piece:
        ended = event.finish_reason is not None
        by_token = event.finish_reason == "stop"
        made = "" if by_token else self._detokenizer.push(event.token_id)
        self._tell(event, made)
        text = self._through(made)
        if self._stops.found is None and ended:
            text += self._through(self._detokenizer.finish()) + ("" if self._stops.found else self._stops.finish())
        self._out += len(text)
        if self._stops.found is not None:
            self.finish_reason, reason = "stop", self._stops.found
            return Piece(text, self._before(self._out), "stop", reason)
        if not ended:
            return Piece(text, self._whole())
        self.finish_reason = "stop" if by_token else "length"
        stop_reason = event.token_id if by_token and event.token_id in self._stop_token_ids else None
        told, self._told = tuple(self._told), deque()
        return Piece(text, told, self.finish_reason, stop_reason)

    def _through(self, made: str) -> str:
        self._made += len(made)
        return self._stops.push(made)

    def _tell(self, event: TokenEvent, made: str) -> None:
        if self._logprobs is None:
            return
        assert event.logprob is not None
        self._told.append(ToldToken(event.token_id, event.logprob, event.top[: self._logprobs], self._made))
        if made:
            for token in self._told:
                token.end = self._made + len(made) if token.end is None else token.end

    def _whole(self) -> tuple[ToldToken, ...]:
        """Tokens whose text is out: others may turn out to be part of a stop string."""
        told = []
        while self._told and self._told[0].end is not None and self._told[0].end <= self._out:
            told.append(self._told.popleft())
        return tuple(told)

    def _before(self, place: int) -> tuple[ToldToken, ...]:
        told = tuple(token for token in self._told if token.start < place)
        self._told.clear()
        return told
