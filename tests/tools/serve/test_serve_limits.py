# SPDX-License-Identifier: Apache-2.0
"""Many clients at once: a full queue, clients that go away, a server that ends, an engine that fails."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from served_app import NAME, PATIENCE, App, Start, Visit, wait_for

from optimum_neuron.engine.engine import Engine


SLOTS = 3
LONG: dict[str, Any] = {"model": NAME, "temperature": 0, "max_tokens": 40, "ignore_eos": True, "stream": True}


@contextmanager
def held_engine(app: App, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Steps wait until the test lets them go on: what is asked meanwhile stays where it is."""
    may_run, real_step = threading.Event(), app.service.engine.step

    def step() -> list[Any]:
        may_run.wait()
        return real_step()

    monkeypatch.setattr(app.service.engine, "step", step)
    try:
        yield may_run
    finally:
        may_run.set()


def visit(app: App, prompt: str, **options: Any) -> Visit:
    return Visit(app, "/v1/completions", LONG | {"prompt": prompt} | options)


def text_of(client: Visit) -> str:
    return "".join(json.loads(event)["choices"][0]["text"] for event in client.events if event != "[DONE]")


def test_a_step_that_hangs_ends_answers_and_is_what_health_says(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    app = start(step_timeout=0.2)
    with held_engine(app, monkeypatch):
        whole = app.complete("Hi", max_tokens=4)
        answers = [whole, app.request("GET", "/health"), app.request("GET", "/ping"), app.complete("Hi")]
    for answer in answers:
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (503, "engine_stopped"), answer.text
        assert "a step took more than 0.2 s" in error["message"]
    assert app.gate.live == 0
    assert app.service._thread is not None
    app.service._thread.join(PATIENCE)  # only then the model is free again


def test_a_client_that_goes_away_frees_its_slot_and_others_keep_their_tokens(app: App) -> None:
    alone = app.complete("good", temperature=0, max_tokens=20, ignore_eos=True).json()["choices"][0]["text"]

    async def main() -> None:
        engine = app.service.engine
        leaving = [visit(app, f"leaves {number}", stream=number % 2 > 0, max_tokens=50) for number in range(SLOTS + 2)]
        await wait_for(lambda: engine.statistics.generated_tokens > 22)
        for client in leaving:
            client.leave()
            await client.end()
        await wait_for(lambda: not engine.has_work)
        assert app.gate.live == 0
        good = visit(app, "good", max_tokens=20)
        await good.end()
        assert text_of(good) == alone

    asyncio.run(main())
    assert app.metric("request_success_total", finished_reason="abort") == SLOTS + 2
    assert app.metric("num_requests_running") == app.metric("num_requests_waiting") == 0
    assert app.metric("generation_tokens_total") < 50 * (SLOTS + 2)


def test_what_a_client_does_not_read_has_a_bound(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optimum_neuron.tools.serve.answer._MOST_UNREAD", 5)

    async def main() -> None:
        client = visit(app, "Hi")
        client.reads.clear()
        await wait_for(lambda: app.gate.live == 1)
        await wait_for(lambda: app.gate.live == 0)
        client.reads.set()
        await client.end()
        *pieces, error, done = client.events
        assert len(pieces) < 10 and done == "[DONE]"
        assert "5 pieces of the answer are not read" in json.loads(error)["error"]["message"]

    asyncio.run(main())
    assert app.metric("request_success_total", finished_reason="abort") == 1


def test_a_long_text_holds_up_no_short_one(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_go_on, real = threading.Event(), threading.Event(), app.encoder._tokenize_prompt

    def ids(prompt: Any, *arguments: Any) -> Any:
        if len(prompt) == 60:
            begun.set()
            assert may_go_on.wait(PATIENCE)
        return real(prompt, *arguments)

    monkeypatch.setattr(app.encoder, "_tokenize_prompt", ids)
    # The size of a body decides; what it consists of does not.
    monkeypatch.setattr("optimum_neuron.tools.serve.app.SMALL_BODY", 200)

    async def main() -> None:
        long = visit(app, "x" * 60, max_tokens=2, user="u" * 100)
        await wait_for(begun.is_set)
        short = visit(app, "x" * 20, max_tokens=2)
        await short.end()
        assert short.status == 200 and not long.task.done()
        may_go_on.set()
        await long.end()
        assert long.status == 200

    asyncio.run(main())


def test_bodies_find_room_until_their_tokens_are_known(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optimum_neuron.tools.serve.app.HELD_BYTES", 4000)
    monkeypatch.setattr("optimum_neuron.tools.serve.gate.SMALL_BODY", 500)
    app = start()

    async def main() -> None:
        large = {"user": "x" * 2000}
        with held_engine(app, monkeypatch) as may_run:
            first = visit(app, "a", **large)
            await wait_for(lambda: app.gate.live == 1)
            # Those that wait for a token hold no bytes; those that still come do.
            unfinished = visit(app, "b", **large)
            message = unfinished._incoming.get_nowait()
            unfinished._incoming.put_nowait(message | {"more_body": True})
            refused = visit(app, "c", **large)
            await refused.end()
            assert refused.status == 503 and json.loads(refused.sent)["error"]["code"] == "too_many_bytes"
            assert int(refused.headers["retry-after"]) >= 1
            small = visit(app, "d")
            await wait_for(lambda: app.gate.live == 2)
            unfinished.leave()
            await unfinished.end()
            again = visit(app, "e", **large)
            await wait_for(lambda: app.gate.live == 3)
            may_run.set()
            for client in (first, small, again):
                await client.end()
                assert client.status == 200

    asyncio.run(main())


def test_a_key_is_checked_before_a_body_is_read_and_who_leaves_before_is_nobody(start: Start) -> None:
    async def status_without_a_body(app: App, *, leaves: bool) -> int | None:
        client = visit(app, "x")
        client._incoming.get_nowait()
        if leaves:
            client.leave()
        await client.end()
        return client.status

    app = start(api_key="secret")
    assert asyncio.run(status_without_a_body(app, leaves=False)) == 401
    app.close()
    app = start(max_queue=0)
    assert asyncio.run(status_without_a_body(app, leaves=True)) is None
    assert app.gate.live == 0 and app.service.engine.statistics.steps == 0
    assert app.complete(["a", "b", "c"], max_tokens=2).status_code == 200
    assert app.complete(["a", "b", "c", "d"], max_tokens=2).status_code == 400  # without a queue


def test_an_engine_that_fails_ends_all_and_health_says_so(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    real_step = app.service.engine.step

    def step() -> list[Any]:
        if app.service.engine.statistics.steps == 6:
            raise RuntimeError("device lost")
        return real_step()

    monkeypatch.setattr(app.service.engine, "step", step)

    async def main() -> None:
        streams = [visit(app, f"s{number}") for number in range(SLOTS)]
        waiting = visit(app, "waits", stream=False)
        for client in streams:
            await client.end()
            *_, error, done = client.events
            assert "device lost" in json.loads(error)["error"]["message"] and done == "[DONE]"
            assert json.loads(error)["error"]["type"] == "server_error"
        await waiting.end()
        assert waiting.status == 503 and "device lost" in waiting.sent.decode()

    asyncio.run(main())
    health = app.request("GET", "/health")
    assert health.status_code == 503 and health.json()["error"]["code"] == "engine_stopped"
    assert app.complete().status_code == 503 and app.gate.live == 0
    assert app.metric("request_success_total", finished_reason="error") == SLOTS + 1


def test_a_request_that_fails_harms_nobody_and_shows_no_insides(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    def add(engine: Engine, request: Any, real: Callable[..., None] = Engine.add_request) -> None:
        if request.max_new_tokens == 13:
            raise RuntimeError("cannot be added")
        real(engine, request)

    monkeypatch.setattr(Engine, "add_request", add)
    alone = app.complete("good", temperature=0, max_tokens=20).json()["choices"][0]["text"]

    async def main() -> None:
        clients = [visit(app, "good", max_tokens=20), visit(app, "bad", max_tokens=13), visit(app, "x" * 65)]
        for client in clients:
            await client.end()
        assert [client.status for client in clients] == [200, 500, 400]
        assert text_of(clients[0]) == alone
        assert "cannot be added" in clients[1].sent.decode()

    asyncio.run(main())
    assert app.request("GET", "/health").status_code == 200

    def broken(*args: Any, **options: Any) -> None:
        raise KeyError("secret insides")

    monkeypatch.setattr("optimum_neuron.tools.serve.app.ServedAnswer", broken)
    answer = app.complete()
    assert answer.status_code == 500 and "secret" not in answer.text
    assert answer.json()["error"]["message"] == "the server failed (KeyError); its log has more"
    assert app.gate.live == 0


def test_one_of_many_that_is_refused_takes_the_others_along(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    real = app.service.subscribe

    def subscribe(request: Any, put: Any) -> None:
        if request.request_id.endswith("-2"):
            raise ValueError("the third is refused")
        real(request, put)

    monkeypatch.setattr(app.service, "subscribe", subscribe)
    answer = app.complete(["a", "b", "c", "d"], max_tokens=40, ignore_eos=True)
    assert answer.status_code == 400 and "the third is refused" in answer.text
    asyncio.run(wait_for(lambda: not app.service.engine.has_work))
    assert app.gate.live == 0
