# SPDX-License-Identifier: Apache-2.0
"""The engine's thread: requests from any thread or event loop, their tokens as they come, and every way it can end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers import VOCAB, Opener, random_tokens

from optimum_neuron.engine.engine import Engine
from optimum_neuron.engine.request import Request
from optimum_neuron.engine.service import EngineService, EngineStoppedError
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


def expected(runner: GraphRunner, names: range, new_tokens: int = 6) -> list[list[int]]:
    results = []
    for name in names:
        engine = Engine(runner, vocab_size=VOCAB)
        engine.add_request(request(name, new_tokens))
        results.append([event.token_id for event in engine.run()])
    return results


def test_threads_get_their_own_tokens(runner: GraphRunner) -> None:
    alone = expected(runner, range(12))
    with EngineService(Engine(runner, vocab_size=VOCAB)) as service, ThreadPoolExecutor(12) as pool:
        assert list(pool.map(lambda name: list(service.submit(request(name))), range(12))) == alone


def test_an_event_loop_gets_tokens_of_many_requests_at_once(runner: GraphRunner) -> None:
    alone = expected(runner, range(8))

    async def read(service: EngineService, name: int) -> list[int]:
        return [token async for token in service.submit(request(name))]

    async def main() -> list[list[int]]:
        with EngineService(Engine(runner, vocab_size=VOCAB)) as service:
            return await asyncio.gather(*(read(service, name) for name in range(8)))

    assert asyncio.run(main()) == alone


def test_a_stream_says_why_it_ended(runner: GraphRunner, service: EngineService) -> None:
    tokens = expected(runner, range(1))[0]
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
    stream.abort()
    rest = list(stream)
    assert stream.finish_reason == "abort" and len(rest) < 49
    again = service.submit(request(0))
    stream.abort()  # means the first request, not this one
    tokens = list(again)
    assert tokens[0] == first and again.finish_reason == "length"


def test_leaving_a_stream_early_aborts_it(runner: GraphRunner) -> None:
    engine = Engine(runner, vocab_size=VOCAB)
    with EngineService(engine) as service:
        with service.submit(request(0, new_tokens=50)) as stream:
            next(stream)
        service.abort("unknown")
        assert list(service.submit(request(1)))
    assert engine.statistics.aborted == 1 and engine.statistics.finished == 1


def test_what_can_never_be_served_is_refused_in_the_callers_thread(service: EngineService) -> None:
    with pytest.raises(ValueError, match="exceeds sequence_length=64"):
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


def test_a_closed_event_loop_ends_its_requests(runner: GraphRunner) -> None:
    engine = Engine(runner, vocab_size=VOCAB)
    with EngineService(engine) as service:

        async def read_one() -> None:
            await anext(service.submit(request(0, new_tokens=55)))

        asyncio.run(read_one())
    assert engine.statistics.aborted + engine.statistics.finished == 1
