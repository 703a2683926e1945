# SPDX-License-Identifier: Apache-2.0
"""The engine's thread: requests from any thread or event loop, their tokens as they come, and every way it can end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from engine_requests import serve_alone
from helpers import VOCAB, Opener, random_tokens
from transformers import LogitsProcessorList

from optimum_neuron.core import Request
from optimum_neuron.engine.engine import Engine
from optimum_neuron.engine.events import RequestFailedError, TokenEvent
from optimum_neuron.engine.service import EngineService, EngineStoppedError
from optimum_neuron.engine.stream import Item, TokenStream
from optimum_neuron.runtime.runner import GraphRunner


@pytest.fixture
def runner(open_runner: Opener) -> GraphRunner:
    return open_runner("llama")


@pytest.fixture
def service(runner: GraphRunner) -> Iterator[EngineService]:
    service = EngineService(Engine(runner, vocab_size=VOCAB))
    yield service
    service.close()
    assert not service.is_running


def request(name: object, new_tokens: int = 6, length: int = 9) -> Request:
    prompt = random_tokens(length, seed=int(str(name)))
    return Request(request_id=str(name), prompt_token_ids=prompt, max_new_tokens=new_tokens)


def expected(runner: GraphRunner, *names: int) -> list[list[int]]:
    return [serve_alone(runner, request(name)) for name in names]


def test_threads_and_event_loops_get_their_own_tokens(runner: GraphRunner, service: EngineService) -> None:
    alone = expected(runner, *range(12))

    async def read(name: int) -> list[int]:
        return [token async for token in service.submit(request(name))]

    async def main() -> list[list[int]]:
        return await asyncio.gather(*(read(name) for name in range(12)))

    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(lambda name: list(service.submit(request(name))), range(12))) == alone
    assert asyncio.run(main()) == alone


def test_a_stream_says_why_it_ended(runner: GraphRunner, service: EngineService) -> None:
    tokens = expected(runner, *range(1))[0]
    stream = service.submit(request(0))
    assert stream.finish_reason is None
    assert list(stream) == tokens and stream.finish_reason == "length"
    assert list(stream) == []
    ending = Request(
        request_id="0",
        prompt_token_ids=request(0).prompt_token_ids,
        max_new_tokens=6,
        eos_token_ids=frozenset({tokens[2]}),
    )
    stream = service.submit(ending)
    assert list(stream) == tokens[: tokens.index(tokens[2]) + 1] and stream.finish_reason == "stop"


def test_an_aborted_stream_ends_and_its_id_is_free_again(service: EngineService) -> None:
    stream = service.submit(request(0, new_tokens=50))
    first = next(stream)
    service.abort_request("unknown")
    stream.abort()
    rest = list(stream)
    assert stream.finish_reason == "abort" and len(rest) < 49
    again = service.submit(request(0))
    stream.abort()  # means the first request, not this one
    tokens = list(again)
    assert tokens[0] == first and again.finish_reason == "length"


def test_what_can_never_be_served_is_refused_in_the_callers_thread(service: EngineService) -> None:
    with pytest.raises(ValueError, match="do not fit sequence_length=64"):
        service.submit(request(0, new_tokens=80))
    stream = service.submit(request(1, new_tokens=50))
    with pytest.raises(ValueError, match="request '1' is not finished"):
        service.submit(request(1))
    stream.abort()


@pytest.mark.parametrize("finish", [True, False])
def test_closing_finishes_or_aborts_what_is_there_and_takes_no_more(runner: GraphRunner, finish: bool) -> None:
    closed = []
    service = EngineService(Engine(runner, vocab_size=VOCAB), lambda: closed.append(True))
    streams = [service.submit(request(name, new_tokens=20)) for name in range(5)]
    service.close(finish=finish)
    service.close()
    assert closed == [True]
    lengths = [len(list(stream)) for stream in streams]
    assert {stream.finish_reason for stream in streams} == {"length" if finish else "abort"}
    assert lengths == [20] * 5 if finish else sum(lengths) < 100
    with pytest.raises(EngineStoppedError, match="closed"):
        service.submit(request(9))


def test_a_failing_step_reaches_everyone_who_waits(runner: GraphRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(runner, vocab_size=VOCAB)
    service = EngineService(engine)
    running = threading.Event()
    real_step = engine.step

    def step() -> list:
        running.wait()
        if engine.statistics.steps == 3:
            raise RuntimeError("device lost")
        return real_step()

    monkeypatch.setattr(engine, "step", step)
    streams = [service.submit(request(name, new_tokens=20)) for name in range(5)]
    running.set()
    for stream in streams:
        with pytest.raises(
            EngineStoppedError, match=f"request '{stream.request_id}' finished: device lost"
        ) as failure:
            list(stream)
        assert isinstance(failure.value.__cause__, RuntimeError)
        with pytest.raises(EngineStoppedError):  # not a wait for ever
            next(stream)
    with pytest.raises(EngineStoppedError) as failure:
        service.submit(request(9))
    assert str(failure.value.__cause__) == "device lost"
    assert not engine.has_work
    service.close()


@pytest.fixture
def hanging(runner: GraphRunner, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """A runner whose first step sets one event and ends after the other."""
    begun, ends = threading.Event(), threading.Event()
    run = runner.executable.run

    def blocked(*arguments: object) -> object:
        begun.set()
        ends.wait()
        return run(*arguments)

    monkeypatch.setattr(runner.executable, "run", blocked)
    yield begun, ends
    ends.set()


def test_a_step_that_hangs_ends_its_requests_with_an_error(
    runner: GraphRunner, hanging: tuple[threading.Event, threading.Event]
) -> None:
    closed: list[str] = []
    service = EngineService(Engine(runner, vocab_size=VOCAB), lambda: closed.append("closed"), step_timeout=0.2)
    streams = [service.submit(request(name)) for name in range(8)]
    for stream in streams:
        with pytest.raises(EngineStoppedError, match=r"request '\d' finished: a step took more than 0\.2 s"):
            list(stream)
    assert service.stopped == "a step took more than 0.2 s"
    with pytest.raises(EngineStoppedError, match="closed and takes no requests"):
        service.submit(request(9))
    service.close()  # waits for no step, and gives no slot back that the step may still write to
    assert service.is_running and not closed
    hanging[1].set()
    assert service._thread is not None
    service._thread.join(60)
    assert not service.is_running and not service.engine.has_work and closed


def test_closing_waits_for_a_step_no_longer_than_asked(
    runner: GraphRunner, hanging: tuple[threading.Event, threading.Event]
) -> None:
    service = EngineService(Engine(runner, vocab_size=VOCAB), step_timeout=60)
    stream = service.submit(request(0))
    hanging[0].wait()
    service.close(timeout=0.1)
    with pytest.raises(EngineStoppedError, match=r"the step under way did not end within 0\.1 s"):
        list(stream)
    hanging[1].set()  # the next test has the same runner
    assert service._thread is not None
    service._thread.join(60)


def test_a_stream_can_be_read_on_in_another_event_loop(service: EngineService) -> None:
    stream = service.submit(request(0, new_tokens=55))

    async def read_one() -> int:
        return await anext(stream)

    async def read_on() -> list[int]:
        return [token async for token in stream]

    asyncio.run(read_one())
    rest = asyncio.run(asyncio.wait_for(read_on(), 60))
    # Between the two loops no reader could be called, which ends the request.
    assert len(rest) <= 54 and stream.finish_reason == ("length" if len(rest) == 54 else "abort")


def exits(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """What ends a thread or a program elsewhere is this request's fault, too."""
    raise SystemExit(7)


def test_a_request_that_fails_tells_its_reader_and_nobody_else(runner: GraphRunner, service: EngineService) -> None:
    alone = expected(runner, *range(4))
    prompt = request(0).prompt_token_ids
    evil = Request(request_id="evil", prompt_token_ids=prompt, processors=LogitsProcessorList([exits]))
    streams = [service.submit(request(name)) for name in range(2)]
    failing = service.submit(evil)
    streams += [service.submit(request(name)) for name in range(2, 4)]
    assert [list(stream) for stream in streams] == alone
    for _ in range(2):  # not a wait for ever
        with pytest.raises(RequestFailedError, match=r"request 'evil' failed: .* SystemExit: 7") as failure:
            next(failing)
    assert isinstance(failure.value.__cause__, SystemExit)

    async def read() -> None:
        async for _ in service.submit(evil):
            pass

    with pytest.raises(RequestFailedError, match="SystemExit"):
        asyncio.run(read())
    assert list(service.submit(request(1))) == alone[1]


@pytest.mark.parametrize(("at", "again"), [(1, False), (3, True)])
def test_a_callback_that_raises_ends_its_own_request(
    runner: GraphRunner, service: EngineService, at: int, again: bool
) -> None:
    alone = expected(runner, *range(3))
    calls: list[Item] = []
    told = threading.Event()

    def put(item: Item) -> None:
        calls.append(item)
        if not isinstance(item, TokenEvent):
            told.set()
        if len(calls) >= at and (again or isinstance(item, TokenEvent)):
            raise SystemExit("evil")

    streams = [service.submit(request(name)) for name in range(2)]
    service.subscribe(Request(request_id="evil", prompt_token_ids=[5, 6, 7], max_new_tokens=6), put)
    streams.append(service.submit(request(2)))
    assert [list(stream) for stream in streams] == alone
    assert told.wait(60)
    assert [type(item) for item in calls] == [TokenEvent] * at + [RequestFailedError]
    assert "request 'evil' failed: its callback raised: SystemExit: evil" in str(calls[-1])
    evil = Request(request_id="evil", prompt_token_ids=[5, 6, 7], max_new_tokens=6)  # the id is free
    assert len(list(service.submit(evil))) == 6


def test_what_cannot_be_added_after_all_ends_alone(
    runner: GraphRunner, service: EngineService, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = service.engine.add_request

    def refuses(given: Request) -> None:
        if given.request_id == "1":
            raise OverflowError("evil")
        add(given)

    monkeypatch.setattr(service.engine, "add_request", refuses)
    streams = [service.submit(request(name)) for name in range(3)]
    with pytest.raises(RequestFailedError, match="request '1' failed: it could not be added: OverflowError: evil"):
        list(streams[1])
    assert [list(streams[name]) for name in (0, 2)] == expected(runner, 0, 2)


async def read_and_close(stream: TokenStream) -> None:
    async with contextlib.aclosing(stream):
        await anext(stream)


async def read_until_cancelled(stream: TokenStream) -> None:
    async def read() -> None:
        async for _ in stream:
            await asyncio.sleep(3600)

    task = asyncio.create_task(read())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


# Each has a token, and no reader of the stream is left when it returns.
WAYS: dict[str, Callable[[TokenStream], object]] = {
    "dropped": next,
    "closed": lambda stream: (next(stream), stream.close()),
    "its event loop ended": lambda stream: asyncio.run(anext(stream)),
    "closed in an event loop": lambda stream: asyncio.run(read_and_close(stream)),
    "cancelled": lambda stream: asyncio.run(read_until_cancelled(stream)),
}


@pytest.mark.parametrize("way", WAYS)
def test_an_abandoned_stream_frees_its_slot(runner: GraphRunner, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Three endless requests hold all slots: a fourth is served because their readers left, and not because they ended."""
    engine = Engine(runner, vocab_size=VOCAB)
    real_step, turns = engine.step, queue.SimpleQueue[int]()
    # Where a slot is not freed the turns run out, which ends the engine with an error, and not with a wait for ever.
    monkeypatch.setattr(engine, "step", lambda: (turns.get(timeout=60), real_step())[1])
    with EngineService(engine) as service:
        for name in range(3):
            for _ in range(4):  # enough for its first token whatever ran before, and all together far from the last
                turns.put(1)
            WAYS[way](service.submit(request(name, new_tokens=55)))
        gc.collect()
        last = service.submit(request(3))
        for _ in range(20):
            turns.put(1)
        assert len(list(last)) == 6
    assert engine.statistics.aborted == 3 and engine.statistics.finished == 1
    assert len(engine.scheduler.cache.free_rows) == 3
