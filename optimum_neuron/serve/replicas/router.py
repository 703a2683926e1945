# SPDX-License-Identifier: Apache-2.0
"""The front's application: passes each request to one replica, and to another one where nothing came back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence

import httpx2
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..errors import ApiError, ClientGoneError, failed
from ..http import error_response, read_body, to_json
from .metrics import CONTENT_TYPE, FrontMetrics
from .replica import Replica, choose


# A request that kills its server may kill one more, and no third.
ATTEMPTS = 2
# Seconds after which a client may come again while no replica is up.
RETRY_AFTER = 5
_UNAVAILABLE = frozenset({502, 503, 504})
# Of one connection, not of the message (RFC 9110, 7.6.1), or made anew.
_OF_CONNECTION = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade host content-length".split()
)


class LostError(Exception):
    """A replica's server is gone, or answers that it is no more available, and the client has got nothing."""


class Router:
    """An ASGI application. `/health` and `/ping` are of the front, and `/metrics` of all together; all else is a replica's.

    Attributes:
        draining: nobody comes in any more.
    """

    def __init__(self, replicas: Sequence[Replica], client: httpx2.AsyncClient) -> None:
        self._replicas, self._client = replicas, client
        self._metrics = FrontMetrics(replicas, client)
        self.draining = False

    @property
    def live(self) -> int:
        """Requests that are not answered yet."""
        return sum(replica.live for replica in self._replicas)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"the front serves http alone, not {scope['type']}")
        try:
            if scope["path"] == "/metrics":
                await Response(await self._metrics.text(), media_type=CONTENT_TYPE)(scope, receive, send)
                return
            self._check_open()
            if scope["path"] in ("/health", "/ping"):
                await Response()(scope, receive, send)
            else:
                await self._pass_on(scope, receive, send)
        except ApiError as error:
            self._metrics.refused(error.status)
            await error_response(error)(scope, receive, send)
        except ClientGoneError:
            pass  # nobody reads what would be sent

    def _check_open(self) -> None:
        if self.draining:
            raise failed("the server ends and takes no more requests; ask another one", status=503, code="draining")
        if choose(self._replicas, ()) is None:
            raise failed(
                f"no replica is up now; try again in {RETRY_AFTER} s",
                status=503,
                code="no_replica",
                headers={"Retry-After": str(RETRY_AFTER)},
            )

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(Request(scope, receive))
        gone = asyncio.create_task(_disconnected(receive))
        tried: list[Replica] = []
        try:
            while (replica := choose(self._replicas, tried)) is not None and len(tried) < ATTEMPTS:
                if tried:
                    self._metrics.retried()
                tried.append(replica)
                relay = Relay(self._client, scope, body, send, is_last=len(tried) == ATTEMPTS)
                with contextlib.suppress(LostError), replica.use():
                    return await relay.run(replica, gone)
        finally:
            gone.cancel()
        asked = " and ".join(f"replica {each.index}" for each in tried)
        raise failed(
            f"{asked or 'every replica'} went down before anything was answered; try again in {RETRY_AFTER} s",
            status=503,
            code="replica_lost",
            headers={"Retry-After": str(RETRY_AFTER)},
        )


class Relay:
    """One attempt at a request: its answer, from a replica to the client."""

    def __init__(self, client: httpx2.AsyncClient, scope: Scope, body: bytes, send: Send, *, is_last: bool) -> None:
        self._client, self._scope, self._body, self._send, self._is_last = client, scope, body, send, is_last
        self._started = False

    async def run(self, replica: Replica, gone: asyncio.Task[None]) -> None:
        """Passes the request on, until its answer has ended.

        Raises:
            ClientGoneError: the client closed its connection.
            LostError: nothing was sent to the client, and another replica may be asked.
        """
        assert replica.url is not None
        answer = asyncio.create_task(self._answer(replica.url))
        lost = asyncio.create_task(replica.lost.wait())
        try:
            await asyncio.wait({answer, lost, gone}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return await answer
            if gone.done():
                raise ClientGoneError
            raise LostError
        except (httpx2.TransportError, LostError) as error:
            if not self._started:
                raise LostError from error
            await self._break_off(replica)
        finally:
            for task in (answer, lost):
                task.cancel()
            await asyncio.gather(answer, lost, return_exceptions=True)

    async def _answer(self, url: str) -> None:
        path = self._scope["raw_path"].decode("ascii")
        query = self._scope["query_string"].decode("ascii")
        headers = _of_message(self._scope["headers"])
        where = f"{url}{path}?{query}" if query else url + path
        async with self._client.stream(self._scope["method"], where, headers=headers, content=self._body) as response:
            if response.status_code in _UNAVAILABLE and not self._is_last:
                raise LostError
            if response.headers.get("content-type", "").startswith("text/event-stream"):
                await self._events(response)
            else:
                await self._whole(response)

    async def _whole(self, response: httpx2.Response) -> None:
        # Read to its end first: where the server dies meanwhile, another one can still answer.
        body = b"".join([part async for part in response.aiter_raw()])
        await self._start(response, [(b"content-length", str(len(body)).encode())])
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _events(self, response: httpx2.Response) -> None:
        rest = b""
        async for part in response.aiter_raw():
            # Whole events alone, so that what is told after a server's death is one, too.
            whole, mark, rest = (rest + part).rpartition(b"\n\n")
            if mark:
                if not self._started:
                    await self._start(response, [])
                await self._send({"type": "http.response.body", "body": whole + mark, "more_body": True})
        if not self._started:
            await self._start(response, [])
        await self._send({"type": "http.response.body", "body": rest, "more_body": False})

    async def _start(self, response: httpx2.Response, more: list[tuple[bytes, bytes]]) -> None:
        self._started = True
        headers = [*_of_message(response.headers.raw), *more]
        await self._send({"type": "http.response.start", "status": response.status_code, "headers": headers})

    async def _break_off(self, replica: Replica) -> None:
        error = failed(
            f"replica {replica.index} died before the answer's end; send the request again", code="replica_lost"
        )
        body = b"data: " + to_json(error.body()) + b"\n\ndata: [DONE]\n\n"
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


def _of_message(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(name.lower(), value) for name, value in headers if name.lower() not in _OF_CONNECTION]


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
