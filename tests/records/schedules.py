# SPDX-License-Identifier: Apache-2.0
"""Digests of 10,000 plans of the scheduler, over random workloads that a seed fixes."""

from __future__ import annotations

import hashlib
import random
import zlib
from collections import Counter
from collections.abc import Iterator
from itertools import count, islice, product

from optimum_neuron.config import NeuronConfig
from optimum_neuron.core import Request, Step
from optimum_neuron.engine.policy import SchedulerOptions
from optimum_neuron.engine.scheduler import Scheduler


PLANS, PLANS_OF_A_DIGEST = 10_000, 125
CACHES, REUSES, POLICIES = ("slots", "blocks"), ("prefix reuse", "no reuse"), ("mixed", "alternate")
LENGTH, BLOCK, VOCAB, END = 256, 64, 7, 3
# What prompts begin with, so that prefixes are common.
_SHARED = [random.Random("shared").randrange(VOCAB) for _ in range(LENGTH)]


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def digest_schedules() -> dict[str, list[str]]:
    """Return digests of plans by kind of workload; each digest is of 125 plans, in order."""
    kinds = list(product(CACHES, REUSES, POLICIES))
    found = {}
    for cache, reuse, policy in kinds:
        lines = islice(_plans(cache, reuse, policy), PLANS // len(kinds))
        parts = iter(lambda lines=lines: list(islice(lines, PLANS_OF_A_DIGEST)), [])
        found[f"{cache}, {reuse}, {policy}"] = [digest("\n".join(part).encode()) for part in parts]
    return found


def _plans(cache: str, reuse: str, policy: str) -> Iterator[str]:
    """Yield a line for each plan of one workload after the other, without an end."""
    for number in count():
        rng = random.Random(f"{cache}, {reuse}, {policy}, {number}")
        scheduler = _scheduler(rng, has_blocks=cache == "blocks", reuses=reuse == "prefix reuse", policy=policy)
        yield from _play(rng, scheduler, has_slots=cache == "slots")


def _scheduler(rng: random.Random, *, has_blocks: bool, reuses: bool, policy: str) -> Scheduler:
    slots, rows = rng.randint(2, 6), rng.randint(1, 2)
    sizes = {"kv_block_size": BLOCK, "kv_cache_tokens": LENGTH + BLOCK * rng.randint(0, 6)} if has_blocks else {}
    config = NeuronConfig(
        batch_size=slots, sequence_length=LENGTH, prefill_chunk_size=rng.choice([16, 32]), ctx_batch_size=min(rows, slots),
        context_buckets=rng.choice([(LENGTH,), (LENGTH // 2, LENGTH)]), mixed_step=policy == "mixed", **sizes,
    )  # fmt: skip
    options = SchedulerOptions(
        policy=policy,  # type: ignore[arg-type]
        max_step_tokens=rng.choice([None, slots + rng.randint(1, 48)]), long_prefill_token_threshold=rng.choice([0, 0, 20]),
        itl_target_ms=rng.choice([None, None, 12.0]), max_bypass=rng.randint(0, 3), chunk_alignment=rng.choice([1, 1, 16]),
        prefix_reuse=reuses, reuse_generated=rng.random() < 0.5,
    )  # fmt: skip
    return Scheduler(config, options, min_reuse=2, state_places=rng.choice([None, None, 4]))


def _play(rng: random.Random, scheduler: Scheduler, *, has_slots: bool) -> Iterator[str]:
    """Yield the plans of one workload. Some requests are aborted."""
    arrivals = sorted((rng.randint(0, 12), number) for number in range(rng.randint(4, 14)))
    due = [(at, _request(rng, f"r{number}")) for at, number in arrivals]
    aborts = {rng.randint(1, 24): f"r{rng.randrange(len(due))}" for _ in range(2)}
    tokens: Counter[str] = Counter()
    for number in count():
        while due and due[0][0] <= number:
            scheduler.add_request(due.pop(0)[1])
        if number in aborts:
            scheduler.abort_request(aborts[number])
        step = scheduler.schedule()
        if step is None and not due:
            return
        if step is not None:
            yield describe(step, has_slots=has_slots)
            decoded = [_token(each.request_id, tokens) for each in step.decodes]
            prefilled = [_token(each.request_id, tokens) if each.is_last else 0 for each in step.pieces]
            scheduler.commit(step, decoded, prefilled, rng.uniform(0.001, 0.02))


def _request(rng: random.Random, name: str) -> Request:
    prompt = [*_SHARED[: rng.randint(0, LENGTH // 2)], *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 6)))]
    most, ends = rng.choice([1, 2, 4, 8, 20, 90]), frozenset({END}) if rng.random() < 0.5 else frozenset[int]()
    priority = int(rng.random() < 0.2)
    return Request(
        request_id=name, prompt_token_ids=prompt, max_new_tokens=most, eos_token_ids=ends, priority=priority
    )


def _token(name: str, tokens: Counter[str]) -> int:
    tokens[name] += 1
    return zlib.crc32(f"{name} {tokens[name]}".encode()) % VOCAB


def describe(step: Step, *, has_slots: bool) -> str:
    """Return all that a plan decides. This names no class, so that a change of names leaves it equal; a slot is a block."""
    decided = (
        step.graph.name,
        [(each.request_id, each.slot) for each in step.decodes],
        [
            (each.request_id, each.slot, each.start, each.count, each.is_first, each.is_last,
             each.prefix and (each.prefix.length, each.prefix.state))
            for each in step.pieces
        ],
        step.passed_over and step.passed_over.request_id,
        [(each.request_id, each.slot) for each in step.preempted],
        []
        if has_slots
        else [(each.request_id, each.slot, each.first, each.blocks, each.shared) for each in step.assignments],
        [tuple(each) for each in step.copies],
        [(each.request_id, each.slot, each.length, each.place) for each in step.kept],
    )  # fmt: skip
    return repr(decided)
