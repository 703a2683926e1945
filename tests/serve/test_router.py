# SPDX-License-Identifier: Apache-2.0
"""The front of several servers: who gets a request, and what its client is told where a server dies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import httpx2
import pytest
from served_app import PATIENCE

from optimum_neuron.serve.replicas.replica import Replica
from optimum_neuron.serve.replicas.router import Router


EVENTS = [
    b'data: {"choices": [{"text": "one"}]}\n\n',
    b'data: {"choices": [{"text": "two"}]}\n\n',
    b"data: [DONE]\n\n",
]
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\nconnection: close\r\n\r\n"
Behaviour = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def sends(*parts: bytes) -> Behaviour:
    """Sends something and closes the connection."""

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.01)

    return behave


def whole(body: bytes, status: str = "200 OK", promised: int | None = None) -> Behaviour:
    """An answer that is no stream, of which more may be promised than comes."""
    size = len(body) if promised is None else promised
    return sends(
        f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {size}\r\n\r\n".encode() + body
    )


def hangs(*parts: bytes) -> Behaviour:
    """Sends something, and then nothing more until its client leaves."""

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await sends(*parts)(reader, writer)
        await reader.read()

    return behave


class Upstream:
    """A server of one replica, which behaves as it is told."""

    def __init__(self, behave: Behaviour) -> None:
        self._behave = behave
        self.heads: list[str] = []
        self.bodies: list[bytes] = []
        self.left = asyncio.Event()

    async def start(self) -> str:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return "http://{}:{}".format(*self.server.sockets[0].getsockname())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next((int(line[16:]) for line in head.lower().splitlines() if line.startswith("content-length: ")), 0)
        self.heads.append(head)
        self.bodies.append(await reader.readexactly(length))
        await self._behave(reader, writer)
        self.left.set()
        writer.close()


class Front:
    """A router over such servers, asked over ASGI."""

    def __init__(self, upstreams: Sequence[Upstream], replicas: list[Replica], client: httpx2.AsyncClient) -> None:
        self.upstreams, self.replicas = upstreams, replicas
        self.router = Router(replicas, client)
        self.client = httpx2.AsyncClient(transport=httpx2.ASGITransport(self.router), base_url="http://front")

    @property
    def asked(self) -> list[int]:
        return [len(each.heads) for each in self.upstreams]

    async def ask(self, **headers: str) -> httpx2.Response:
        return await self.client.post("/v1/completions?x=1", content=b'{"n": 1}', headers=headers)


def front(use: Callable[[Front], Awaitable[None]], *behaviours: Behaviour) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(httpx2.AsyncClient(trust_env=False, timeout=None))
            upstreams = [Upstream(each) for each in behaviours]
            replicas = [Replica(index, url=await each.start()) for index, each in enumerate(upstreams)]
            await use(Front(upstreams, replicas, client))
            for each in upstreams:
                each.server.close()

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


def error(response: httpx2.Response) -> dict[str, Any]:
    found: dict[str, Any] = response.json()["error"]
    return found


def test_a_request_reaches_the_replica_that_has_the_fewest_as_it_was_sent() -> None:
    async def use(front: Front) -> None:
        with front.replicas[0].use():
            response = await front.ask(authorization="Bearer k", traceparent="00-1-2-01", connection="x")
        assert (response.status_code, response.json()) == (200, {"ok": 2})
        assert response.headers["content-type"] == "application/json" and front.asked == [0, 1]
        head, body = front.upstreams[1].heads[0].lower(), front.upstreams[1].bodies[0]
        assert head.startswith("post /v1/completions?x=1 ") and body == b'{"n": 1}'
        assert "authorization: bearer k" in head and "traceparent: 00-1-2-01" in head and "connection: x" not in head
        assert front.router.live == 0

    front(use, whole(b'{"ok": 1}'), whole(b'{"ok": 2}'))


def test_a_stream_reaches_the_client_as_it_came() -> None:
    async def use(front: Front) -> None:
        response = await front.ask()
        assert response.content == b"".join(EVENTS) and response.headers["content-type"].startswith(
            "text/event-stream"
        )

    front(use, sends(STREAM, EVENTS[0][:9], EVENTS[0][9:] + EVENTS[1], EVENTS[2]))


@pytest.mark.parametrize(
    "dies",
    [
        sends(),
        sends(b"HTTP/1.1 200 OK\r\ncontent-ty"),
        sends(STREAM.replace(b"connection: close", b"content-length: 99")),
        whole(b'{"ok": ', promised=99),
        whole(b"{}", "503 Service Unavailable"),
    ],
    ids=["nothing", "half a head", "no event", "half a body", "unavailable"],
)
def test_where_nothing_was_answered_another_replica_is_asked(dies: Behaviour) -> None:
    async def use(front: Front) -> None:
        response = await front.ask()
        assert (response.status_code, response.json(), front.asked) == (200, {"ok": 2}, [1, 1])
        metrics = (await front.client.get("/metrics")).text
        assert "optimum_neuron:front_retries_total 1.0" in metrics

    front(use, dies, whole(b'{"ok": 2}'))


def test_an_answer_that_breaks_off_ends_with_whole_events_and_an_error() -> None:
    async def use(front: Front) -> None:
        response = await front.ask()
        first, told, last, rest = response.content.split(b"\n\n")
        assert (first + b"\n\n", last, rest, front.asked) == (EVENTS[0], b"data: [DONE]", b"", [1, 0])
        found = json.loads(told.removeprefix(b"data: "))["error"]
        assert found["code"] == "replica_lost" and "replica 0 died before the answer's end" in found["message"]

    length = STREAM.replace(b"connection: close", b"content-length: 999")
    front(use, sends(length, EVENTS[0] + EVENTS[1][:12]), sends(STREAM, *EVENTS))


def test_who_waits_for_a_server_that_is_given_up_does_not_wait_for_ever() -> None:
    async def use(front: Front) -> None:
        silent = asyncio.create_task(front.ask())
        while front.asked != [1, 0]:
            await asyncio.sleep(0.01)
        front.replicas[0].give_up()
        assert (await silent).json() == {"ok": 2}
        assert front.asked == [1, 1]

    front(use, hangs(), whole(b'{"ok": 2}'))


def test_a_request_that_kills_its_servers_kills_no_third() -> None:
    async def use(front: Front) -> None:
        response = await front.ask()
        assert (response.status_code, error(response)["code"], front.asked) == (503, "replica_lost", [1, 1, 0])
        assert int(response.headers["retry-after"]) > 0 and "replica 0 and replica 1" in error(response)["message"]

    front(use, sends(), sends(), whole(b"{}"))


def test_a_refusal_is_passed_on_and_so_is_the_last_replicas_503() -> None:
    async def use(front: Front) -> None:
        assert ((await front.ask()).status_code, front.asked) == (429, [1, 0])
        front.replicas[0].give_up()
        assert ((await front.ask()).status_code, front.asked) == (503, [1, 1])

    front(use, whole(b"{}", "429 Too Many Requests"), whole(b"{}", "503 Service Unavailable"))


def test_without_a_replica_or_at_the_end_clients_are_told_at_once() -> None:
    async def use(front: Front) -> None:
        assert (await front.client.get("/health")).status_code == 200
        front.router.draining = True
        assert (error(await front.ask())["code"], front.asked) == ("draining", [0])
        front.router.draining = False
        front.replicas[0].pause()
        refused = await front.ask()
        assert (refused.status_code, error(refused)["code"]) == (503, "no_replica") and refused.headers["retry-after"]
        assert (await front.client.get("/health")).status_code == (await front.client.get("/ping")).status_code == 503
        assert 'front_replica_up{replica="0"} 0.0' in (await front.client.get("/metrics")).text

    front(use, whole(b"{}"))


def test_a_client_that_leaves_leaves_its_replica_too() -> None:
    async def use(front: Front) -> None:
        sent: list[Any] = []
        messages = [{"type": "http.request", "body": b"{}"}]
        some = asyncio.Event()

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await some.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)
            if message["type"] == "http.response.body":
                some.set()

        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "raw_path": b"/v1/chat/completions"}
        await front.router({**scope, "query_string": b"", "headers": []}, receive, send)
        await front.upstreams[0].left.wait()
        assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
        assert front.router.live == 0

    front(use, hangs(STREAM, EVENTS[0]))


def test_a_body_that_is_too_large_reaches_no_replica() -> None:
    async def use(front: Front) -> None:
        response = await front.client.post("/v1/completions", content=b" " * (2**24 + 1))
        assert (response.status_code, front.asked) == (413, [0])

    front(use, whole(b"{}"))


def test_metrics_are_those_of_all_replicas_with_their_numbers() -> None:
    text = '# HELP a_total Things.\n# TYPE a_total counter\na_total{x="%s"} %d\n# TYPE b gauge\nb 1\n'

    async def use(front: Front) -> None:
        lines = (await front.client.get("/metrics")).text.splitlines()
        assert lines.count("# TYPE a_total counter") == 1
        assert {'a_total{replica="0",x="y"} 3.0', 'a_total{replica="1",x="z"} 4.0', 'b{replica="1"} 1.0'} <= set(lines)

    front(use, whole((text % ("y", 3)).encode()), whole((text % ("z", 4)).encode()))
