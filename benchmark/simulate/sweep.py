# SPDX-License-Identifier: Apache-2.0
"""All combinations of what is compared, each simulated; and the published run, to check the costs by."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import product

from optimum_neuron import progress
from optimum_neuron.config import NeuronConfig
from optimum_neuron.engine.policy import SchedulerOptions

from ..output import warn
from .results import Check, Row, Setting
from .simulation import Workload, simulate
from .step_costs import Calibration


# One bar per run that takes longer; a step takes about this long on one core.
SHOWN_AFTER_S, STEP_S = 2.0, 2e-4
# Replicas have the same load up to one user: these stand for all. Fewer requests would leave no 99th percentile.
SIMULATED_REPLICAS, LEAST_REQUESTS = 8, 320
# optimum-neuron PR 1086, row D. Its throughput over its request rate, 440.4 / 2.077, is 212 tokens a request, and its
# rate times its latency of 13.82 s is 29 requests in flight: the second workload is what it says of itself.
PUBLISHED = {"tok/s": 440.4, "ITL mean ms": 55.9, "TTFT mean ms": 1966.5}
CHECKED = {
    "32 users, 250 new tokens, as described": Workload(requests=160, users=32, spread=0.1),
    "29 users, 212 new tokens, as its rates imply": Workload(requests=160, users=29, new_tokens=212, spread=0.1),
}


def workload_of(args: Namespace, users: int) -> Workload:
    """The load that the options describe, for so many users.

    Raises:
        ValueError: a request does not fit a slot.
    """
    if args.prompt_tokens + args.new_tokens > args.sequence_length:
        raise ValueError(
            f"{args.prompt_tokens} prompt tokens and {args.new_tokens} new tokens exceed --sequence-length "
            f"{args.sequence_length}; raise it or ask for fewer"
        )
    return Workload(
        requests=args.requests or 0,
        users=0 if args.rate else users,
        rate=args.rate or 0.0,
        ramp_s=20.0 if args.ramp is None else args.ramp,
        prompt_tokens=args.prompt_tokens,
        new_tokens=args.new_tokens,
        spread=args.spread,
        shared_prefix=args.shared_prefix,
        seed=args.seed,
    )


def check_calibration() -> list[Check]:
    """The published run under the policy of those who measured it: all chunks of a prompt between two decode steps."""
    setting = Setting(32, 1, "all_chunks", 32, 1024, 1)
    options = SchedulerOptions(policy="all_chunks", prefix_reuse=False)
    rows = []
    for name, workload in CHECKED.items():
        config = _config(setting, 4096, [])
        row = Row.of(setting, config, [simulate(config, options, Calibration().seconds, workload)])
        simulated = (row.tok_s, row.itl_mean_ms, row.ttft_mean_ms)
        rows.append(Check(name, PUBLISHED, dict(zip(PUBLISHED, simulated, strict=True))))
    return rows


def run(args: Namespace, calibration: Calibration) -> list[Row]:
    """One row per combination that can be exported."""
    cases = list(_cases(args))
    steps = sum(
        share.requests * (share.new_tokens / config.batch_size + share.prompt_tokens / config.prefill_chunk_size)
        for setting, config, _, workload in cases
        for share in _shares(workload, setting.replicas)
    )
    stage = progress.stage("Simulating", 100 * len(cases)) if steps * STEP_S > SHOWN_AFTER_S else None
    rows = []
    with stage or nullcontext(lambda description: None) as advance:
        for setting, config, options, workload in cases:
            shares = list(_shares(workload, setting.replicas))
            on_finish = _percent(sum(share.requests for share in shares), advance, setting.describe())
            outcomes = [simulate(config, options, calibration.seconds, share, on_finish) for share in shares]
            rows.append(Row.of(setting, config, outcomes))
    return rows


def _cases(args: Namespace) -> Iterator[tuple[Setting, NeuronConfig, SchedulerOptions, Workload]]:
    refused: list[str] = []
    done = 0
    axes = (args.replicas, args.policies, args.batch_sizes, args.chunk_sizes, args.ctx_batch_sizes)
    for setting in (Setting(*values) for values in product([0] if args.rate else args.users or [32], *axes)):
        workload = workload_of(args, setting.users)
        if 0 < workload.users < setting.replicas:
            raise ValueError(f"{setting.replicas} replicas cannot share {setting.users} users; lower --replicas")
        options = SchedulerOptions(
            policy=setting.policy, prefix_reuse=args.shared_prefix > 0, itl_target_ms=args.itl_target_ms
        )
        try:
            config = _config(setting, args.sequence_length, args.chunk_buckets)
        except ValueError as error:
            refused.append(f"{setting.describe()}: {error}")
            continue
        done += 1
        yield setting, config, options, workload
    if refused and not done:
        raise ValueError(refused[0])
    for line in refused:
        warn(f"left out {line}")


def _config(setting: Setting, sequence_length: int, buckets: list[int]) -> NeuronConfig:
    return NeuronConfig(
        batch_size=setting.batch_size,
        sequence_length=sequence_length,
        prefill_chunk_size=setting.chunk_size,
        prefill_chunk_buckets=tuple(size for size in sorted(set(buckets)) if size < setting.chunk_size),
        ctx_batch_size=setting.ctx_batch_size,
        mixed_step=setting.policy == "mixed",
        target="inf2",
    )


def _shares(workload: Workload, replicas: int) -> Iterator[Workload]:
    """What the replicas serve that are simulated: those with a user more than others come first."""
    for index in range(min(replicas, SIMULATED_REPLICAS)):
        users = workload.users // replicas + (index < workload.users % replicas)
        requests = workload.requests or max(LEAST_REQUESTS, users)
        rate, seed = workload.rate / replicas, workload.seed + index
        yield replace(workload, users=users, requests=requests, rate=rate, seed=seed)


def _percent(requests: int, advance: Callable[[str], None], description: str) -> Callable[[], None]:
    """Advances at each percent of the requests, not at each request."""
    finished = 0

    def on_finish() -> None:
        nonlocal finished
        before, finished = finished, finished + 1
        for _ in range(100 * finished // requests - 100 * before // requests):
            advance(description)

    return on_finish
