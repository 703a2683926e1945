# SPDX-License-Identifier: Apache-2.0
"""The application before the replicas: a request goes to one, and to another one if the first ends before its first token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from ray import serve
from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError, TaskCancelledError, WorkerCrashedError
from ray.serve.handle import DeploymentHandle
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ..gate import HELD_BYTES, Bodies, Body, Gate
from ..http import ApiError, ClientGoneError, EventSender, json_response, server_error, to_json, watch_client
from ..metrics import CONTENT_TYPE
from .replica import ReplicaClosedError


# Replicas that one request may take: a request that ends each one must not end all.
TRIES = 3
# Seconds after an engine has stopped, in which Ray finds it and sends requests elsewhere.
CLOSED_PAUSE = 4.0
_LOST = (RayActorError, NodeDiedError, ObjectLostError, WorkerCrashedError)
_METRICS_TIMEOUT = 5.0
# Of a request's scope, what a replica needs.
_HEAD = ("type", "http_version", "method", "scheme", "path", "root_path", "query_string", "headers")


class Front:
    """The application before the replicas of one application of Ray Serve. The event loop's thread uses it, and any thread may `stop` it."""

    def __init__(self, replicas: DeploymentHandle[Any], gate: Gate, name: str) -> None:
        self._replicas, self._gate, self._name = replicas, gate, name
        self._bodies = Bodies(HELD_BYTES)
        self._relays: set[Relay] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["path"] in ("/health", "/ping"):
                response = await self._health()
            elif scope["path"] == "/metrics":
                response = await self._metrics()
            else:
                await self._forward(scope, receive, send)
                return
        except ApiError as error:
            response = error.to_response()
        except ClientGoneError:
            return  # no answer is read any more
        await response(scope, receive, send)

    def stop(self) -> None:
        for relay in list(self._relays):
            relay.cancel(server_error("the server ended before the answer did", status=503, code="draining"))

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._gate.check_open()
        with ExitStack() as held:
            body = held.enter_context(Body(self._bodies))
            data = bytes(await body.read_all(scope, receive))
            head = {name: scope[name] for name in _HEAD}
            head["headers"] = [(name, value) for name, value in scope["headers"] if name != b"authorization"]
            relay = Relay(lambda: self._replicas.options(stream=True).answer.remote(head, data), send, held.close)
            with self._gate.admit_requests(1) as admission:
                self._relays.add(relay)
                try:
                    async with watch_client(receive, lambda: relay.cancel(ClientGoneError())):
                        await relay.run_request()
                finally:
                    self._relays.discard(relay)
                admission.leave_one()

    async def _health(self) -> Response:
        self._gate.check_open()
        status = (await asyncio.to_thread(serve.status)).applications.get(self._name)
        found = status.deployments.values() if status is not None else ()
        counts = {state.lower(): count for each in found for state, count in each.replica_states.items()}
        if not counts.get("running"):
            text = f"no replica runs ({counts}); wait until Ray has started one"
            raise server_error(text, status=503, code="no_replica")
        return json_response({"replicas": counts})

    async def _metrics(self) -> Response:
        asked = self._replicas.broadcast("read_metrics")
        texts = await asked.results_async(timeout_s=_METRICS_TIMEOUT, return_exceptions=True)
        # A replica that ends has no metrics.
        joined = _Joined(dict(text for text in texts if not isinstance(text, BaseException)))
        return Response(generate_latest(joined), media_type=CONTENT_TYPE)


class Relay:
    """One request: the client has no token of it yet, or one replica's answer is on its way. `begun` frees the body then."""

    def __init__(self, ask: Callable[[], Any], send: Send, begun: Callable[[], None]) -> None:
        self._ask, self._send, self._begun = ask, send, begun
        self._answer: Any = None
        self._why: Exception | None = None
        self._has_begun = self._is_stream = self._is_whole = False

    def cancel(self, why: Exception) -> None:
        """End the request, in any thread; `run_request` raises or sends the reason."""
        self._why = why
        if self._answer is not None:
            self._answer.cancel()

    async def run_request(self) -> None:
        """Send the answer of the first replica that has one. An ApiError within a stream is its last event, and else raised."""
        try:
            await self._try_replicas()
        except ApiError as error:
            if not self._is_stream:
                raise
            sender = EventSender(self._send)
            sender.started = True
            await sender.send_event(to_json(error.to_dict()))
            await sender.send_end()

    async def _try_replicas(self) -> None:
        for attempt in range(TRIES):
            if self._why is not None:
                raise self._why
            self._answer = self._ask()
            try:
                async for messages in self._answer:
                    self._has_begun = True
                    self._begun()
                    for message in messages:
                        await self._send_message(message)
                return
            except ReplicaClosedError:
                await asyncio.sleep(CLOSED_PAUSE if attempt + 1 < TRIES else 0)
            except (TaskCancelledError, *_LOST) as error:
                if self._is_whole:
                    return
                if self._why is not None:
                    raise self._why from error
                if self._has_begun:
                    text = "the replica ended before the answer did; ask again"
                    raise server_error(text, status=503, code="replica_lost") from error
        raise server_error(f"{TRIES} replicas ended with this request, and it is not tried again", code="replica_lost")

    async def _send_message(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._is_stream = any(value.startswith(b"text/event-stream") for _, value in message["headers"])
        else:
            self._is_whole = not message.get("more_body", False)
        await self._send(message)


class _Joined(Collector):
    """The metrics of replicas, of which each sample names its replica."""

    def __init__(self, texts: dict[str, str]) -> None:
        self._texts = texts

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for replica, text in self._texts.items():
            for family in text_string_to_metric_families(text):
                whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                labelled = (sample._replace(labels=sample.labels | {"replica": replica}) for sample in family.samples)
                whole.samples.extend(labelled)
        yield from families.values()
