# SPDX-License-Identifier: Apache-2.0
"""What the tests of the scheduler share: schedulers, requests, and steps run with a made-up token."""

from __future__ import annotations

from typing import Any

from invariants import check_cache

from optimum_neuron.config import NeuronConfig
from optimum_neuron.core import Request, Step
from optimum_neuron.engine.policy import SchedulerOptions
from optimum_neuron.engine.scheduler import Scheduler


TOKEN = 1
UNIQUE = iter(range(10_000, 10_000_000))


def make(
    slots: int = 4, chunk: int = 8, rows: int = 1, length: int = 256, buckets: tuple[int, ...] = (), **options: Any
) -> Scheduler:
    """A scheduler with mixed graphs unless the policy is one that has no use for them."""
    config = NeuronConfig(
        batch_size=slots,
        sequence_length=length,
        prefill_chunk_size=chunk,
        prefill_chunk_buckets=buckets,
        ctx_batch_size=rows,
        mixed_step=slots > 1 and options.get("policy", "mixed") == "mixed",
    )
    return Scheduler(config, SchedulerOptions(**options), min_reuse=2)


def request(name: str, prompt: int | list[int], new: int | None = 100, **fields: Any) -> Request:
    """A prompt given as a length shares no prefix with any other."""
    tokens = [next(UNIQUE) for _ in range(prompt)] if isinstance(prompt, int) else prompt
    return Request(request_id=name, prompt_token_ids=tokens, max_new_tokens=new, **fields)


def add(scheduler: Scheduler, *requests: Request) -> None:
    for item in requests:
        scheduler.add_request(item)


Tokens = list[tuple[str, int, str | None]]


def commit(scheduler: Scheduler, step: Step, seconds: float | None = None) -> Tokens:
    events = scheduler.commit(step, [TOKEN] * len(step.decodes), [TOKEN] * len(step.pieces), seconds)
    check_cache(scheduler.cache)
    return [(event.request_id, event.token_id, event.finish_reason) for event in events]


def advance(scheduler: Scheduler, steps: int = 1) -> Tokens:
    """Runs steps and returns the tokens of the last one."""
    events: Tokens = []
    for _ in range(steps):
        events = commit(scheduler, next_step(scheduler))
    return events


def next_step(scheduler: Scheduler) -> Step:
    step = scheduler.schedule()
    assert step is not None
    return step


def counts(step: Step) -> dict[str, int]:
    return {chunk.request_id: chunk.count for chunk in step.pieces}


def with_decodes(number: int, **sizes: Any) -> Scheduler:
    """A scheduler in which `number` requests generate."""
    scheduler = make(**sizes)
    for index in range(number):
        add(scheduler, request(f"d{index}", 1))
        advance(scheduler)
        while scheduler.queues.prefilling or scheduler.queues.waiting:
            advance(scheduler)
    assert len(scheduler.queues.running) == number
    return scheduler
