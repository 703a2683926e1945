# SPDX-License-Identifier: Apache-2.0
"""200 requests at once to one server, a third of them given up: none of the others is lost or changed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

from openai import AsyncOpenAI
from serving import Server


REQUESTS, LONGEST_PROMPT, MOST_TOKENS = 200, 300, 32


@dataclass(frozen=True)
class Job:
    """One client.

    Attributes:
        gives_up: None, or after how many pieces of its stream; 0 gives up a moment after asking.
    """

    prompt: list[int]
    new_tokens: int
    streams: bool
    gives_up: int | None
    moment: float


def make_jobs(prompts: list[list[int]], chance: random.Random) -> list[Job]:
    jobs = []
    for index in range(REQUESTS):
        gives_up = None
        if index % 3 == 0:
            gives_up = 0 if index % 2 else chance.randint(1, 6)
        jobs.append(
            Job(
                prompt=chance.choice(prompts),
                # Whoever gives up in the middle has not nearly all yet.
                new_tokens=150 if gives_up else chance.randint(1, MOST_TOKENS),
                streams=bool(gives_up) or chance.random() < 0.4,
                gives_up=gives_up,
                moment=chance.random() * 2,
            )
        )
    chance.shuffle(jobs)
    return jobs


async def ask(client: AsyncOpenAI, model: str, job: Job) -> list[int]:
    """The tokens that a client got, all or as far as it read."""
    options = {
        "model": model,
        "prompt": job.prompt,
        "max_tokens": job.new_tokens,
        "temperature": 0,
        "extra_body": {"return_token_ids": True, "ignore_eos": True},
    }
    if not job.streams:
        return (await client.completions.create(**options)).choices[0].token_ids
    tokens, pieces = [], 0
    stream = await client.completions.create(stream=True, **options)
    async for piece in stream:
        tokens += piece.choices[0].token_ids
        pieces += 1
        if pieces == job.gives_up:
            await stream.close()
            break
    return tokens


async def run_job(client: AsyncOpenAI, model: str, job: Job) -> list[int] | None:
    """As `ask`; None where the client went away before it had anything."""
    asking = asyncio.create_task(ask(client, model, job))
    if job.gives_up != 0:
        return await asking
    await asyncio.wait([asking], timeout=job.moment)
    return None if asking.cancel() else await asking


async def run_all(server: Server, jobs: list[Job]) -> list[list[int] | None]:
    async with server.async_client as client:
        return await asyncio.gather(*(run_job(client, server.model, job) for job in jobs))


def test_200_clients_at_once_of_whom_a_third_gives_up_lose_nothing(
    text_server: Server, greedy: Callable[[list[int], int], list[int]]
) -> None:
    chance = random.Random(7)
    lengths = [1, 2, 31, 32, 33, LONGEST_PROMPT, *(chance.randint(1, LONGEST_PROMPT) for _ in range(14))]
    prompts = [[chance.randrange(3, 40_000) for _ in range(length)] for length in lengths]
    # Prompts that start alike, to be served from each other's slots.
    prompts += [prompts[5][:150] + prompts[-1], prompts[5][:200]]
    expected = {tuple(prompt): greedy(prompt, MOST_TOKENS) for prompt in prompts}
    jobs = make_jobs(prompts, chance)
    answers = asyncio.run(run_all(text_server, jobs))
    for job, tokens in zip(jobs, answers, strict=True):
        right = expected[tuple(job.prompt)]
        if job.gives_up is None:
            assert tokens == right[: job.new_tokens]
        elif tokens is not None:
            count = min(len(tokens), MOST_TOKENS)
            assert tokens[:count] == right[:count]
    assert sum(tokens is None for tokens in answers) >= REQUESTS // 12
    text_server.wait_idle()
    (last,) = asyncio.run(run_all(text_server, [Job(prompts[5], MOST_TOKENS, False, None, 0)]))
    assert last == expected[tuple(prompts[5])]
    assert text_server.metric("kv_cache_usage_perc") == 0
