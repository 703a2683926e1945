# SPDX-License-Identifier: Apache-2.0
"""The routes: OpenAI's for chats, completions and models, /health and /metrics, and those of SageMaker."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ...text.stream import TokenTexts
from .answer import ServedAnswer
from .gate import HELD_BYTES, SMALL_BODY, Bodies, Body, Gate, read_object
from .http import ApiError, ClientGoneError, EventSender, KeyCheck, json_response, server_error, watch_client
from .metrics import CONTENT_TYPE, Metrics
from .prompts import PromptEncoder
from .protocol import Asked, LoadedModel, read_chat, read_completion, unknown_model
from .tracing import Tracing
from .writing import AnswerWriter, ChatForm, CompletionForm


# The reader of a body, and the form of its answers.
Kind = tuple[Callable[[Mapping[str, Any], LoadedModel], Asked], CompletionForm]


@dataclass(frozen=True)
class AnswerRoute:
    """A route that generates; an ASGI application of its own, as it has to see its client go away."""

    served: LoadedModel
    gate: Gate
    metrics: Metrics
    encoder: PromptEncoder
    bodies: Bodies
    tracing: Tracing | None
    kind_of: Callable[[dict[str, Any]], Kind]  # of a body, into which it may write members that clients need not send

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived = time.perf_counter()
        try:
            self.gate.check_open()
            with ExitStack() as admitted:
                with Body(self.bodies) as body:
                    data = await body.read_all(scope, receive)
                    is_long = len(data) > SMALL_BODY
                    if is_long:
                        form, asked = await self.encoder.run_long(partial(self._read_request, data))
                    else:
                        form, asked = self._read_request(data)
                    admission = admitted.enter_context(self.gate.admit_requests(len(asked.prompts) * asked.n))
                    prompts = await self.encoder.encode_prompts(asked, is_long=is_long)
                data, asked = bytearray(), replace(asked, prompts=())  # which take memory
                name = f"{form.prefix}-{uuid.uuid4().hex}"
                headers = Headers(scope=scope)
                answer = ServedAnswer(
                    self.served, self.metrics, admission, asked, prompts, name, arrived, headers, self.tracing
                )
                writer = AnswerWriter(form, asked, answer, {"id": name, "model": self.served.name})
                async with watch_client(receive, answer.give_up), aclosing(answer.pieces()) as pieces:
                    if asked.stream:
                        await writer.write_stream(pieces, EventSender(send), self.metrics.count_refused)
                        return
                    whole = await writer.write_whole(pieces)
            await json_response(whole)(scope, receive, send)
        except ClientGoneError:
            pass  # no answer is read any more

    def _read_request(self, body: bytearray) -> tuple[CompletionForm, Asked]:
        data = read_object(body)
        read, form = self.kind_of(data)
        return form, read(data, self.served)


def create_app(
    served: LoadedModel,
    gate: Gate,
    metrics: Metrics,
    encoder: PromptEncoder,
    *,
    api_key: str | None = None,
    tracing: Tracing | None = None,
) -> Starlette:
    """Return the ASGI application over a loaded model. Clients have to send a key to the routes that generate, and under /v1."""
    texts = TokenTexts(served.tokenizer)
    entry = {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "optimum-neuron",
        "max_model_len": served.config.sequence_length,
    }

    async def list_models(request: Request) -> Response:
        return json_response({"object": "list", "data": [entry]})

    async def show_model(request: Request) -> Response:
        name = request.path_params["name"]
        if name != served.name:
            raise unknown_model(name, served)
        return json_response(entry)

    async def check_health(request: Request) -> Response:
        gate.check_open()
        return Response()

    async def show_metrics(request: Request) -> Response:
        return Response(metrics.to_text(), media_type=CONTENT_TYPE)

    async def refuse_request(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        metrics.count_refused(error.status)
        return error.to_response()

    async def refuse_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.scope['path']}: {error.detail}; the routes are {', '.join(paths)}"
        return await refuse_request(request, ApiError(message, status=error.status_code, headers=error.headers))

    async def report_failure(request: Request, error: Exception) -> Response:  # its traceback is in the log
        message = f"the server failed ({type(error).__name__}); its log has more"
        return await refuse_request(request, server_error(message))

    chat, completion = (read_chat, ChatForm(texts)), (read_completion, CompletionForm(texts))
    answer = partial(AnswerRoute, served, gate, metrics, encoder, Bodies(HELD_BYTES), tracing)

    def invoked_kind(body: dict[str, Any]) -> Kind:
        """Return the kind that a body for SageMaker's one route has; it need not name the model."""
        if ("messages" in body) == ("prompt" in body):
            raise ApiError("the body has to have either 'messages', of a chat, or 'prompt', of a completion; give one")
        body.setdefault("model", served.name)
        return chat if "messages" in body else completion

    routes = [
        Route("/v1/chat/completions", answer(lambda body: chat), methods=["POST"]),
        Route("/v1/completions", answer(lambda body: completion), methods=["POST"]),
        Route("/v1/models", list_models),
        Route("/v1/models/{name:path}", show_model),
        Route("/invocations", answer(invoked_kind), methods=["POST"]),
        Route("/ping", check_health, methods=["GET", "POST"]),
        Route("/health", check_health),
        Route("/metrics", show_metrics),
    ]
    paths = [route.path for route in routes]
    app = Starlette(
        routes=routes,
        middleware=[] if api_key is None else [Middleware(KeyCheck, api_key, metrics.count_refused)],
        exception_handlers={ApiError: refuse_request, HTTPException: refuse_route, Exception: report_failure},
    )
    # The address of a redirection would be what the client's Host header says.
    app.router.redirect_slashes = False
    return app
