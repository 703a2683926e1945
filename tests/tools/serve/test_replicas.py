# SPDX-License-Identifier: Apache-2.0
"""The front and a replica without Ray's processes: which requests go to another replica, and how the others end."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from served_app import NAME, App, Visit, metric, server_options, wait_for


ray = pytest.importorskip("ray")
from optimum_neuron.tools.serve.gate import Gate  # noqa: E402
from optimum_neuron.tools.serve.http import ApiError  # noqa: E402
from optimum_neuron.tools.serve.process import set_ray_environment  # noqa: E402
from optimum_neuron.tools.serve.replicas import front, launch, replica  # noqa: E402


CLOSED = "closed"
BODY = {"model": NAME, "prompt": "Hi", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


class Handle:
    """Ray Serve's handle of a replica in this process, which dies after as many lists of messages as `fates` say, call by call."""

    def __init__(self, asked: replica.Replica, *fates: int | str | None) -> None:
        self._replica, self._fates = asked, iter(fates)
        self.scopes: list[Any] = []
        self.answer = self

    def options(self, *, stream: bool) -> Handle:
        assert stream
        return self

    def remote(self, scope: Any, body: bytes) -> RemoteAnswer:
        self.scopes.append(scope)
        return RemoteAnswer(self._replica.answer(scope, body), next(self._fates, None))

    def broadcast(self, method: str) -> Any:
        async def results_async(**_: Any) -> list[Any]:
            _, text = await getattr(self._replica, method)()
            return [("one", text), ("two", text), RuntimeError("a replica that ends")]

        return SimpleNamespace(results_async=results_async)


class RemoteAnswer:
    def __init__(self, lists: AsyncIterator[Any], fate: int | str | None) -> None:
        self._lists, self._fate = lists, fate
        self._next: asyncio.Future[Any] | None = None

    def cancel(self) -> None:
        assert self._next is not None
        self._next.get_loop().call_soon_threadsafe(self._next.cancel)

    async def __aiter__(self) -> AsyncIterator[Any]:
        count = 0
        while True:
            if self._fate == CLOSED:
                raise replica.ReplicaClosedError
            if self._fate == count:
                raise ray.exceptions.ActorDiedError
            self._next = asyncio.ensure_future(anext(self._lists))
            try:
                yield await self._next
            except StopAsyncIteration:
                return
            except asyncio.CancelledError:
                raise ray.exceptions.TaskCancelledError from None
            count += 1


@pytest.fixture
def loaded(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[replica.Replica]:
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="one"))
    monkeypatch.setattr(replica.serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(front, "CLOSED_PAUSE", 0)
    made = replica.Replica(server_options(artifact), replica.manifest_digest(artifact))
    yield made
    made.__del__()


def fronted(handle: Handle, loaded: replica.Replica) -> App:
    """The front before a handle, as an application that tests ask."""
    served = loaded._loaded.served
    gate = Gate(served.config.batch_size, 8, lambda: None)
    return App(front.Front(handle, gate, NAME), served, gate, None)  # type: ignore[arg-type]


def streamed(app: App) -> list[Any]:
    """The events of a stream, each without what differs between two requests."""
    lines = app.request("POST", "/v1/completions", BODY | {"stream": True}).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line and line != "data: [DONE]"]
    assert lines[-2:] == ["data: [DONE]", ""]
    return [{name: value for name, value in event.items() if name not in ("id", "created")} for event in events]


def test_an_answer_through_the_front_is_the_servers_own(loaded: replica.Replica, app: App) -> None:
    handle = Handle(loaded)
    through = fronted(handle, loaded)
    assert streamed(through) == streamed(app)
    answer = through.request("POST", "/v1/completions", BODY, Authorization="Bearer secret", Traceparent="00-1")
    assert answer.json()["choices"] == app.complete(**BODY).json()["choices"]
    headers = dict(handle.scopes[-1]["headers"])
    assert b"traceparent" in headers and b"authorization" not in headers
    for method, path in (("GET", "/v1/models/other"), ("GET", "/v1/completions"), ("POST", "/v1/completions")):
        here, there = (each.request(method, path, {}) for each in (through, app))
        assert (here.status_code, here.json()) == (there.status_code, there.json())


def test_a_request_without_a_token_goes_to_another_replica(loaded: replica.Replica, app: App) -> None:
    handle = Handle(loaded, 0, 0, None, CLOSED, 0)
    through = fronted(handle, loaded)
    assert streamed(through) == streamed(app)
    assert through.complete(**BODY).json()["choices"] == app.complete(**BODY).json()["choices"]
    assert len(handle.scopes) == 6 and through.gate.live == 0


def test_a_stream_with_tokens_ends_with_an_error_and_no_whole_answer_does(loaded: replica.Replica, app: App) -> None:
    handle = Handle(loaded, 1, 1)
    through = fronted(handle, loaded)
    *events, last = streamed(through)
    assert events == streamed(app)[: len(events)] and events[0]["choices"][0]["text"]
    assert last["error"]["message"] == "the replica ended before the answer did; ask again"
    assert last["error"]["code"] == "replica_lost"
    whole = through.complete(**BODY).json()
    assert whole["usage"]["completion_tokens"] == 12 and len(handle.scopes) == 2


@pytest.mark.parametrize("stops", [False, True])
def test_a_request_that_ends_each_replica_is_not_tried_for_ever(loaded: replica.Replica, stops: bool) -> None:
    asyncio.run(loaded.check_health())
    if stops:
        loaded._loaded.served.service.close()
        with pytest.raises(ApiError, match="the engine has stopped"):
            asyncio.run(loaded.check_health())
    handle = Handle(loaded, *([] if stops else [0, 0, 0]))
    answer = fronted(handle, loaded).complete(**BODY)
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "replica_lost"
    assert len(handle.scopes) == front.TRIES


def test_a_client_that_leaves_ends_its_request_and_so_does_the_server(loaded: replica.Replica) -> None:
    through = fronted(Handle(loaded), loaded)
    engine = loaded._loaded.served.service.engine

    async def main() -> list[Visit]:
        visits = [Visit(through, "/v1/completions", BODY | {"stream": True, "max_tokens": 60}) for _ in range(2)]
        for visit in visits:
            await visit.until(lambda visit=visit: len(visit.events) > 1)
        visits[0].leave()
        await visits[0].end()
        await asyncio.to_thread(through.app.stop)  # type: ignore[attr-defined]
        await visits[1].end()
        await wait_for(lambda: not engine.scheduler.queues.running and not engine.scheduler.queues.prefilling)
        return visits

    left, ended = asyncio.run(main())
    assert "[DONE]" not in left.events
    assert ended.events[-1] == "[DONE]" and "the server ended before the answer did" in ended.events[-2]
    _, text = asyncio.run(loaded.read_metrics())
    assert metric(text, "request_success_total", finished_reason="abort") == 2 and through.gate.live == 0


def test_a_replica_refuses_another_artifact(artifact: Path) -> None:
    with pytest.raises(ValueError, match=r"has the manifest [0-9a-f]{12}, and the other replicas load abc"):
        replica.Replica(server_options(artifact), "abc")


def test_metrics_and_health_are_of_all_replicas(loaded: replica.Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    through = fronted(Handle(loaded), loaded)
    shown = through.request("GET", "/metrics").text
    for where in ("one", "two"):
        assert f'optimum_neuron:num_requests_running{{model_name="tiny",replica="{where}"}} 0.0' in shown
    assert shown.count("# TYPE optimum_neuron:num_requests_running gauge") == 1
    status = SimpleNamespace(applications={})
    monkeypatch.setattr(front.serve, "status", lambda: status)
    assert through.request("GET", "/health").json()["error"]["code"] == "no_replica"
    deployment = SimpleNamespace(replica_states={"RUNNING": 2, "STARTING": 1})
    status.applications[NAME] = SimpleNamespace(deployments={"Replica": deployment})
    assert through.request("GET", "/ping").json() == {"replicas": {"running": 2, "starting": 1}}
    through.gate.draining = True
    assert through.request("GET", "/health").status_code == 503


SHARED: list[tuple[Any, ...]] = [
    ([{"CPU": 8}], 3, 0, None, (2, {})),
    ([{"CPU": 8}, {"CPU": 4}, {}], 3, 0, None, (4, {})),
    ([{"CPU": 8, "neuron_cores": 4}], 2, 2, None, (4, {"neuron_cores": 2})),
    ([{"CPU": 1}], 2, 0, None, "2 replicas need 1 cores each, and the machines have [{'CPU': 1}]"),
    ([{"CPU": 8}], 3, 0, "4", "3 replicas need 4 cores each"),
    ([{"CPU": 8, "neuron_cores": 3}] * 2, 3, 2, None, "3 replicas need 1 cores and 2 Neuron cores each"),
]


def test_replicas_share_the_cores_of_the_machines_and_are_as_many_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for nodes, replicas, ranks, threads, taken in SHARED:
        monkeypatch.setattr(os, "environ", {} if threads is None else {"OMP_NUM_THREADS": threads})
        if isinstance(taken, str):
            with pytest.raises(ValueError, match=re.escape(taken)):
                launch.replica_resources(nodes, replicas, ranks)
        else:
            assert tuple(launch.replica_resources(nodes, replicas, ranks).values()) == taken
    assert launch.scaling(2, 2, 3) == {"num_replicas": 2}
    bounds = {"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 3}
    assert launch.scaling(1, 4, 3) == {"autoscaling_config": bounds}


@pytest.mark.parametrize(
    "given", [{}, {"RAY_USAGE_STATS_ENABLED": "1", "RAY_AUTH_TOKEN": "own"}, {"RAY_ADDRESS": "auto"}]
)
def test_ray_sends_nothing_unless_the_user_says_so(given: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(given))
    assert set_ray_environment() == ("RAY_ADDRESS" in given)
    token = os.environ.pop("RAY_AUTH_TOKEN", None)
    expected = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_AUTO_CONNECT": "0"} | given
    if "RAY_ADDRESS" not in given:
        expected["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    if not given:
        expected["RAY_AUTH_MODE"] = "token"
        assert token and len(token) == 64
    assert token == expected.pop("RAY_AUTH_TOKEN", token) and os.environ == expected


def test_neuron_cores_of_this_machine_become_rays_resource(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(launch, "usable_cores", lambda: 8)
    monkeypatch.setattr(launch, "check_devices", lambda *asked: given.update(asked=asked) or [4, 5, 8, 9])
    monkeypatch.setattr(launch.ray, "init", lambda *_, **options: given.update(options))
    artifact: Any = SimpleNamespace(target="trn2", manifest={"target_data": {"lnc": 2}})
    assert launch._start_cluster(artifact, 2, 2) == {"num_cpus": 4, "resources": {"neuron_cores": 2}}
    assert given["asked"] == ("trn2", 2, 2, 2) and given["resources"] == {"neuron_cores": 4}
    assert os.environ == {"NEURON_RT_VISIBLE_CORES": "4,5,8,9"}
