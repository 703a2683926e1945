# SPDX-License-Identifier: Apache-2.0
"""The server's application in this process: asked over ASGI, by OpenAI's client or byte by byte."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import numpy as np
from openai import AsyncOpenAI, OpenAI
from starlette.applications import Starlette

from optimum_neuron import NeuronModelForCausalLM
from optimum_neuron.core import Request
from optimum_neuron.engine.service import EngineService
from optimum_neuron.tools.serve.app import create_app
from optimum_neuron.tools.serve.gate import Gate
from optimum_neuron.tools.serve.metrics import Metrics
from optimum_neuron.tools.serve.prompts import PromptEncoder
from optimum_neuron.tools.serve.protocol import LoadedModel
from optimum_neuron.tools.serve.server import ServerOptions
from optimum_neuron.tools.serve.tracing import Tracing


NAME = "tiny"
CHAT = [{"role": "user", "content": "Hi"}]
# How long anything may take before a test fails instead of hanging.
PATIENCE = 120
T = TypeVar("T")


@dataclass
class App:
    """A running application."""

    app: Starlette
    served: LoadedModel
    gate: Gate
    encoder: PromptEncoder

    @property
    def service(self) -> EngineService:
        return self.served.service

    def close(self) -> None:
        self.service.close()
        self.encoder.close()

    def asked(self, ask: Callable[[AsyncOpenAI], Awaitable[T]], **headers: str) -> T:
        """What OpenAI's client gets."""

        async def main() -> T:
            http = httpx2.AsyncClient(transport=httpx2.ASGITransport(self.app), headers=headers)
            client = AsyncOpenAI(base_url="http://test/v1", api_key="none", max_retries=0, http_client=http)
            return await asyncio.wait_for(ask(client), PATIENCE)

        return asyncio.run(main())

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> httpx2.Response:
        """What a client without a library gets. A body of bytes is sent as it is."""

        async def main() -> httpx2.Response:
            transport = httpx2.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
                content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
                return await asyncio.wait_for(client.request(method, path, content=content, headers=headers), PATIENCE)

        return asyncio.run(main())

    def complete(self, prompt: Any = "Hi", **options: Any) -> httpx2.Response:
        return self.request("POST", "/v1/completions", {"model": NAME, "prompt": prompt, **options})

    def chat(self, **options: Any) -> httpx2.Response:
        return self.request("POST", "/v1/chat/completions", {"model": NAME, "messages": CHAT, **options})

    def create(self, route: str, **options: Any) -> Any:
        """Return what OpenAI's client has of a greedy request, a stream as the list of its events."""

        async def ask(client: AsyncOpenAI) -> Any:
            resource = client.chat.completions if route == "chat" else client.completions
            answer = await resource.create(**{"model": NAME, "temperature": 0} | options)
            return [event async for event in answer] if options.get("stream") else answer

        return self.asked(ask)

    def tokens(self, prompt: list[int], count: int, **options: Any) -> list[int]:
        """What the engine alone makes of a prompt."""
        request = Request(
            request_id=uuid.uuid4().hex, prompt_token_ids=np.asarray(prompt), max_new_tokens=count, **options
        )
        return list(self.service.submit(request))

    def read(self, tokens: list[int]) -> str:
        """The text of tokens."""
        text: str = self.served.tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's values, over those with the given labels."""
        return metric(self.request("GET", "/metrics").text, name, **labels)


def server_options(artifact: Path, **options: Any) -> ServerOptions:
    given = {
        "name": NAME, "max_queue": 8, "drain_timeout": 5, "step_timeout": 60, "trust_remote_code": False, "api_key": None,
        "rank_python": None, "rank_timeout": None, "otlp_traces_endpoint": None,
    }  # fmt: skip
    return ServerOptions(artifact=artifact, **given | options)


def metric(text: str, name: str, **labels: str) -> float:
    found = re.findall(rf"^optimum_neuron:{name}\{{(.*)\}} (\S+)$", text, re.MULTILINE)
    assert found, f"no metric {name}"
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(float(value) for shown, value in found if all(label in shown for label in wanted))


Start = Callable[..., App]


@dataclass
class ServerProcess:
    """A server in a process of its own, on the loopback."""

    process: Any
    url: str

    def ask(self, **options: Any) -> Any:
        """Return a long answer as OpenAI's client has it, whole or as a stream."""
        client = OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)
        asked = {"model": NAME, "prompt": "Hi", "max_tokens": 60, "temperature": 0, "extra_body": {"ignore_eos": True}}
        return client.completions.create(**asked | options)

    def metric(self, name: str, **labels: str) -> float:
        return metric(httpx2.get(f"{self.url}/metrics").text, name, **labels)

    def health(self) -> httpx2.Response | None:
        """Return the healthy server's answer."""
        try:
            answer = httpx2.get(f"{self.url}/health", timeout=PATIENCE)
        except httpx2.TransportError:
            return None
        return answer if answer.status_code == 200 else None

    def wait(self, condition: Callable[[], object], seconds: float = PATIENCE) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end and self.process.poll() is None
            time.sleep(0.01)


def start_app(
    model: NeuronModelForCausalLM,
    *,
    tokenizer: Any,
    name: str = NAME,
    eos: frozenset[int] | None = None,
    max_queue: int = 8,
    api_key: str | None = None,
    step_timeout: float | None = None,
    tracing: Tracing | None = None,
) -> App:
    """An application over a service of its own."""
    service = model.serve(step_timeout=step_timeout)
    served = LoadedModel(model, service, tokenizer, name, load_seconds=1.5)
    if eos is not None:
        served.requests.eos_token_ids = eos
    gate = Gate(served.config.batch_size, max_queue, lambda: service.stopped)
    encoder = PromptEncoder(tokenizer, served.config)
    app = create_app(served, gate, Metrics(served, gate), encoder, api_key=api_key, tracing=tracing)
    return App(app, served, gate, encoder)


@dataclass
class Visit:
    """One HTTP request by hand, whose client reads what it wants and may go away.

    Attributes:
        reads: cleared while the client reads nothing.
        status: of the response, once it has begun.
        events: data of its server-sent events.
    """

    app: App
    path: str
    body: dict[str, Any]
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    sent: bytes = b""

    def __post_init__(self) -> None:
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._news = asyncio.Condition()
        self.reads = asyncio.Event()
        self.reads.set()
        self._incoming.put_nowait({"type": "http.request", "body": json.dumps(self.body).encode()})
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
            "path": self.path, "raw_path": self.path.encode(), "query_string": b"", "headers": [], "scheme": "http",
            "server": ("test", 80), "client": ("test", 1), "root_path": "",
        }  # fmt: skip
        self.task = asyncio.create_task(self.app.app(scope, self._incoming.get, self._send))

    @property
    def events(self) -> list[str]:
        return re.findall(r"^data: (.*)\n\n", self.sent.decode(), re.MULTILINE)

    async def _send(self, message: Any) -> None:
        await self.reads.wait()
        async with self._news:
            if message["type"] == "http.response.start":
                self.status = message["status"]
                self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            else:
                self.sent += message["body"]
            self._news.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for the response to be so far."""
        async with self._news:
            await asyncio.wait_for(self._news.wait_for(condition), PATIENCE)

    def leave(self) -> None:
        """The client closes its connection."""
        self._incoming.put_nowait({"type": "http.disconnect"})

    async def end(self) -> None:
        await asyncio.wait_for(self.task, PATIENCE)


def free_port() -> int:
    """A port of the loopback at which nothing listens just now."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


async def wait_for(condition: Callable[[], bool]) -> None:
    """Waits until something holds that no event tells of."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"waited {PATIENCE} s in vain"
        await asyncio.sleep(0.002)
