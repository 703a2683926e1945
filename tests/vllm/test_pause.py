# SPDX-License-Identifier: Apache-2.0
"""Pauses and sleeps of an engine under load: whoever was there gets the same answer afterwards, and memory is free meanwhile."""

from __future__ import annotations

import asyncio
import shutil
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from llm_answers import KINDS, ask, graph_runner, random_prompt
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from optimum_neuron.vllm.worker import REFUSED_CALLS


Run = Callable[[Coroutine[Any, Any, Any]], Any]
CROWD = {f"r{index}": (random_prompt(20 + 9 * index, index), KINDS[index % len(KINDS)]) for index in range(6)}


async def answer(engine: AsyncLLM, name: str, count: int = 24) -> list[int]:
    prompt, params = CROWD[name]
    asked = SamplingParams(**{"temperature": 0, "max_tokens": count, "ignore_eos": True} | params)
    outputs = [each async for each in engine.generate({"prompt_token_ids": prompt}, asked, f"{name}-{id(asked)}")]
    return list(outputs[-1].outputs[0].token_ids)


async def answers(engine: AsyncLLM, meanwhile: Callable[[], Awaitable[None]] | None = None) -> dict[str, list[int]]:
    """What everybody of a crowd gets that asks at once, while something else happens."""
    asked = [asyncio.ensure_future(answer(engine, name)) for name in CROWD]
    if meanwhile is not None:
        await asyncio.sleep(0.05)
        await meanwhile()
    return dict(zip(CROWD, await asyncio.gather(*asked), strict=True))


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module")
def engine(export_text: Callable[..., Path], run: Run) -> Iterator[AsyncLLM]:
    async def start() -> AsyncLLM:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(str(export_text()), enable_sleep_mode=True))

    async def stop() -> None:
        started.shutdown()
        await asyncio.sleep(
            0
        )  # vLLM closes its sockets in the loop, and an open one would block the next engine's end

    started = run(start())
    yield started
    run(stop())


@pytest.fixture(scope="module")
def expected(engine: AsyncLLM, run: Run) -> dict[str, list[int]]:
    return run(answers(engine))  # type: ignore[no-any-return]


def test_a_pause_ends_requests_and_the_engine_serves_on_after_it(
    engine: AsyncLLM, run: Run, expected: dict[str, list[int]]
) -> None:
    async def pause() -> None:
        await engine.pause_generation(mode="abort")
        assert await engine.is_paused()

    cut = run(answers(engine, pause))
    assert all(expected[name][: len(tokens)] == tokens for name, tokens in cut.items())
    assert cut != expected
    run(engine.resume_generation())
    assert run(answers(engine)) == expected


@pytest.mark.parametrize(("level", "mode"), [(0, "keep"), (1, "keep"), (1, "wait"), (2, "abort")])
def test_an_engine_that_slept_gives_the_same_answers(
    engine: AsyncLLM, run: Run, expected: dict[str, list[int]], level: int, mode: str
) -> None:
    async def sleep() -> None:
        await engine.sleep(level, mode)
        assert await engine.is_sleeping()
        if level:
            assert await engine.wake_up(["weights"]) is False
            await engine.collective_rpc("reload_weights")
        assert await engine.wake_up(None) is not False
        assert not await engine.is_sleeping()

    during = run(answers(engine, sleep))
    assert mode == "abort" or during == expected
    assert run(answers(engine)) == expected


def test_what_is_refused_leaves_the_engine_as_it_was(
    engine: AsyncLLM, run: Run, expected: dict[str, list[int]]
) -> None:
    async def call() -> None:
        for name, reason in REFUSED_CALLS.items():
            with pytest.raises(Exception, match="is not supported") as raised:
                await engine.collective_rpc(name)
            assert f"{name} is not supported: {reason}" in str(raised.value)
        assert not await engine.is_paused()

    assert run(answers(engine, call)) == expected


def test_a_sleeping_worker_holds_no_graphs(export_text: Callable[..., Path], open_llm: Callable[..., LLM]) -> None:
    llm = open_llm(export_text())
    prompts = [random_prompt(30, 1), random_prompt(50, 2)]
    before = ask(llm, prompts)
    graphs = weakref.ref(graph_runner(llm))
    for _ in range(2):
        llm.sleep(1)
        assert graphs() is None
    llm.wake_up()
    assert ask(llm, prompts) == before


def test_a_worker_sleeps_with_its_graphs_where_the_artifact_is_gone(
    export_text: Callable[..., Path], open_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    artifact = shutil.copytree(export_text(), tmp_path / "artifact")
    llm = open_llm(artifact, async_scheduling=False)
    before = ask(llm, [random_prompt(30, 1)])
    shutil.rmtree(artifact)
    llm.sleep(1)
    llm.wake_up()
    assert ask(llm, [random_prompt(30, 1)]) == before
