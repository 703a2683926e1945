# SPDX-License-Identifier: Apache-2.0
"""The routes: OpenAI's for chats, completions and models, /health and /metrics, and those that SageMaker asks."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from .answer import Answer
from .chat import ChatForm, read_chat
from .choice import Piece
from .completions import CompletionForm, read_completion
from .errors import ApiError, ClientGoneError, failed
from .gate import Gate
from .http import EventSender, KeyCheck, error_response, read_object, to_json, watched
from .metrics import CONTENT_TYPE, Metrics
from .prompts import PromptEncoder
from .protocol import Asked, unknown_model
from .served_model import ServedModel
from .token_texts import TokenTexts
from .tracing import Tracing


class AnswerRoute:
    """A route that generates; an ASGI application of its own, as it has to see its client go away."""

    def __init__(
        self,
        served: ServedModel,
        gate: Gate,
        metrics: Metrics,
        encoder: PromptEncoder,
        read: Callable[[Mapping[str, Any], ServedModel], Asked],
        form: ChatForm | CompletionForm,
        tracing: Tracing | None,
    ) -> None:
        self._served, self._gate, self._metrics, self._encoder = served, gate, metrics, encoder
        self._read, self._form, self._tracing = read, form, tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.answer(scope, receive, send, time.perf_counter(), None)

    async def answer(
        self, scope: Scope, receive: Receive, send: Send, arrived: float, body: dict[str, Any] | None
    ) -> None:
        """Answers a request that came at `arrived`, and whose body somebody may have read already."""
        try:
            self._gate.check_open()
            asked = self._read(await read_object(Request(scope, receive)) if body is None else body, self._served)
            with self._gate.admit(len(asked.prompts) * asked.n) as admission:
                prompts = await self._encoder.encode(asked)
                name = f"{self._form.prefix}-{uuid.uuid4().hex}"
                answer = Answer(
                    self._served, self._metrics, asked, prompts, name, arrived, Headers(scope=scope), self._tracing
                )
                head = {"id": name, "created": int(time.time()), "model": self._served.name}
                async with watched(receive, answer.give_up), aclosing(answer.pieces(admission)) as pieces:
                    if asked.stream:
                        await self._stream(asked, answer, pieces, head, EventSender(send))
                        return
                    body = await self._whole(asked, answer, pieces, head)
            await Response(to_json(body), media_type="application/json")(scope, receive, send)
        except ClientGoneError:
            pass  # nobody reads what would be sent

    async def _whole(
        self, asked: Asked, answer: Answer, pieces: AsyncIterator[tuple[int, Piece]], head: dict[str, Any]
    ) -> dict[str, Any]:
        texts: list[list[Piece]] = [[] for _ in range(len(answer))]
        async for index, piece in pieces:
            texts[index].append(piece)
        choices = [self._form.whole(index, _joined(each), asked.logprobs) for index, each in enumerate(texts)]
        return {**head, "object": self._form.whole_object, "choices": choices, "usage": answer.usage}

    async def _stream(
        self,
        asked: Asked,
        answer: Answer,
        pieces: AsyncIterator[tuple[int, Piece]],
        head: dict[str, Any],
        sender: EventSender,
    ) -> None:
        head = {**head, "object": self._form.piece_object}
        usage = {"usage": None} if asked.include_usage else {}
        try:
            async for index, piece in pieces:
                if not sender.started:
                    for number in range(len(answer)):
                        for choice in self._form.begin(number):
                            await sender.event(to_json({**head, "choices": [choice], **usage}))
                for choice in self._form.piece(index, piece, asked.logprobs):
                    await sender.event(to_json({**head, "choices": [choice], **usage}))
            if asked.include_usage:
                await sender.event(to_json({**head, "choices": [], "usage": answer.usage}))
        except ApiError as error:
            if not sender.started:
                raise
            self._metrics.refused(error.status)
            await sender.event(to_json(error.body()))
        await sender.end()


class InvocationRoute:
    """SageMaker's one route: the body tells which of OpenAI's is meant, and need not name the model."""

    def __init__(self, chat: AnswerRoute, completions: AnswerRoute, name: str) -> None:
        self._chat, self._completions, self._name = chat, completions, name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived = time.perf_counter()
        try:
            body = await read_object(Request(scope, receive))
        except ClientGoneError:
            return
        if ("messages" in body) == ("prompt" in body):
            raise ApiError("the body has to have either 'messages', of a chat, or 'prompt', of a completion; give one")
        route = self._chat if "messages" in body else self._completions
        await route.answer(scope, receive, send, arrived, {"model": self._name, **body})


def _joined(pieces: list[Piece]) -> Piece:
    told = tuple(token for piece in pieces for token in piece.told)
    return pieces[-1]._replace(text="".join(piece.text for piece in pieces), told=told)


def create_app(
    served: ServedModel,
    gate: Gate,
    metrics: Metrics,
    encoder: PromptEncoder,
    *,
    api_key: str | None = None,
    tracing: Tracing | None = None,
) -> Starlette:
    """The ASGI application over a loaded model.

    Args:
        api_key: what clients have to send to the routes that generate, and to those under /v1; None: nothing.
        tracing: gets a span of each request; None: nobody does.
    """
    texts = TokenTexts(served.tokenizer)
    entry = {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "optimum-neuron",
        "max_model_len": served.config.sequence_length,
    }

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [entry]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        if name != served.name:
            raise unknown_model(name, served)
        return JSONResponse(entry)

    async def health(request: Request) -> Response:
        gate.check_open()
        return Response()

    async def numbers(request: Request) -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        metrics.refused(error.status)
        return error_response(error)

    async def no_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return await refused(
            request,
            ApiError(
                f"{request.method} {request.url.path}: {error.detail}; the routes are {', '.join(paths)}",
                status=error.status_code,
                headers=error.headers,
            ),
        )

    async def broken(request: Request, error: Exception) -> Response:  # its traceback is in the log
        return await refused(request, failed(f"the server failed ({type(error).__name__}); its log has more"))

    chat = AnswerRoute(served, gate, metrics, encoder, read_chat, ChatForm(texts), tracing)
    completions = AnswerRoute(served, gate, metrics, encoder, read_completion, CompletionForm(texts), tracing)
    routes = [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/invocations", InvocationRoute(chat, completions, served.name), methods=["POST"]),
        Route("/ping", health),
        Route("/health", health),
        Route("/metrics", numbers),
    ]
    paths = [route.path for route in routes]
    return Starlette(
        routes=routes,
        middleware=[] if api_key is None else [Middleware(KeyCheck, api_key, metrics.refused)],
        exception_handlers={ApiError: refused, HTTPException: no_route, Exception: broken},
    )
