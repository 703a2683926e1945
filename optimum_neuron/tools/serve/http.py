# SPDX-License-Identifier: Apache-2.0
"""HTTP of this server: errors in OpenAI's form, answers as JSON, a client that goes away, server-sent events, keys."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send


# Characters of a member's name that an answer repeats.
_LONGEST = 100


class ApiError(Exception):
    """The reason why a request gets no answer: one sentence, and OpenAI's `param` (a member of the body), `code` and `type`."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.code, self.kind = message, status, code, kind
        self.param = param and param[:_LONGEST]
        self.headers = dict(headers or {})

    def to_dict(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def to_response(self) -> Response:
        return json_response(self.to_dict(), self.status, self.headers)


def server_error(
    message: str, *, status: int = 500, code: str | None = None, headers: Mapping[str, str] | None = None
) -> ApiError:
    return ApiError(message, status=status, code=code, kind="server_error", headers=headers)


class ClientGoneError(Exception):
    """The client closed its connection: no answer is read."""


def to_json(data: Any) -> bytes:
    """Return compact JSON in UTF-8. Half of a surrogate pair, which a client may have sent and UTF-8 lacks, becomes `?`."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode(errors="replace")


@asynccontextmanager
async def watch_client(receive: Receive, gone: Callable[[], None]) -> AsyncIterator[None]:
    """Call `gone` once when the client closes its connection meanwhile. The body has to be read before."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        gone()

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()


class EventSender:
    """A stream of server-sent events, with the head of the response before the first one."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def send_event(self, data: bytes) -> None:
        if not self.started:
            self.started = True
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),  # nginx would keep events back
            ]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})

    async def send_end(self) -> None:
        await self.send_event(b"[DONE]")
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


def json_response(data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response that no text of a client makes fail."""
    return Response(to_json(data), status, headers, "application/json")


class KeyCheck:
    """Middleware that asks for the key on /invocations and the routes under /v1."""

    def __init__(self, app: ASGIApp, key: str, refused: Callable[[int], None]) -> None:
        self._app, self._key, self._refused = app, key.encode(), refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asks = scope["type"] == "http" and scope["path"].startswith(("/v1", "/invocations"))
        values = [value for name, value in scope["headers"] if name == b"authorization"] if asks else []
        scheme, _, key = (values[0] if len(values) == 1 else b"").partition(b" ")
        if asks and not (scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key)):
            error = ApiError(
                "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'",
                status=401,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            self._refused(error.status)
            await error.to_response()(scope, receive, send)
            return
        await self._app(scope, receive, send)
