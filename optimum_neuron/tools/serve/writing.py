# SPDX-License-Identifier: Apache-2.0
"""An answer as its route's clients read it: at once, or as a stream of its pieces."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from .answer import Answer
from .chat import ChatForm
from .choice import Piece
from .completions import CompletionForm
from .errors import ApiError
from .http import EventSender, to_json
from .protocol import Asked


Form = ChatForm | CompletionForm


class AnswerWriter:
    """Writes one answer.

    Args:
        head: members that the answer, or each event of its stream, begins with.
    """

    def __init__(self, form: Form, asked: Asked, answer: Answer, head: dict[str, Any]) -> None:
        self._form, self._asked, self._answer = form, asked, answer
        self._head = {**head, "created": int(time.time())}
        # The token ids of each choice's prompt, where the answer has token ids.
        self._prompts = [answer.prompt(index) if asked.return_token_ids else None for index in range(len(answer))]

    async def whole(self, pieces: AsyncIterator[tuple[int, Piece]]) -> dict[str, Any]:
        """Return the answer, once all of it is there."""
        each: list[list[Piece]] = [[] for _ in self._prompts]
        async for index, piece in pieces:
            each[index].append(piece)
        choices = [
            self._form.whole(index, _joined(mine), self._asked.logprobs, prompt)
            for index, (mine, prompt) in enumerate(zip(each, self._prompts, strict=True))
        ]
        head = {**self._head, "object": self._form.whole_object, **self._top()}
        return {**head, "choices": choices, "usage": self._answer.usage}

    async def stream(
        self, pieces: AsyncIterator[tuple[int, Piece]], sender: EventSender, refused: Callable[[int], None]
    ) -> None:
        """Send the pieces as they come; an error after the first of them is an event.

        Raises:
            ApiError: before the first piece.
        """
        self._head["object"] = self._form.piece_object
        try:
            async for index, piece in pieces:
                if not sender.started:
                    for number in range(len(self._prompts)):
                        await self._events(sender, self._form.begin(number), 0)
                choices = self._form.piece(index, piece, self._asked.logprobs, self._prompts[index])
                await self._events(sender, choices, piece.tokens)
            if self._asked.include_usage:
                await sender.event(to_json({**self._head, "choices": [], "usage": self._answer.usage}))
        except ApiError as error:
            if not sender.started:
                raise
            refused(error.status)
            await sender.event(to_json(error.body()))
        await sender.end()

    async def _events(self, sender: EventSender, choices: list[dict[str, Any]], tokens: int) -> None:
        """Sends an event for each; a choice has so many tokens by then."""
        for choice in choices:
            event = {**self._head, "choices": [choice], **({} if sender.started else self._top())}
            if self._asked.include_usage:
                event["usage"] = self._answer.usage_after(tokens) if self._asked.continuous_usage else None
            await sender.event(to_json(event))

    def _top(self) -> dict[str, Any]:
        prompt = self._prompts[0]
        return {} if prompt is None else self._form.top(prompt)


def _joined(pieces: list[Piece]) -> Piece:
    """One piece of all that a choice had."""
    return pieces[-1]._replace(
        text="".join(piece.text for piece in pieces),
        told=tuple(token for piece in pieces for token in piece.told),
        token_ids=tuple(token for piece in pieces for token in piece.token_ids),
    )
