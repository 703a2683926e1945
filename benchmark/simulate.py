# SPDX-License-Identifier: Apache-2.0
"""Simulates an engine on AWS Neuron: which chunk size, batch size and policy serve N users, before anything is rented.

The scheduler is the one that serves; only the device is replaced, by a clock that advances by what each step costs. A
graph has fixed shapes, so a step costs what its graph costs. Those costs come from published times of one model on one
instance (see `Calibration`), or from times that you give.

Measured by others: the times that the costs are fitted to. Inferred: how they split into weights, rows and tokens, and
hence every chunk size, batch size and mixed step that nobody measured. Left out: the host (unless --host-ms), attention
that grows with the context (unless the calibration says how), copies of shared prefixes, the network, and whatever
replicas on one instance take from each other. Read differences between rows, not milliseconds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path

from output import publish
from simulate_report import Check, Objective, Report, Row, Setting, plot, print_report
from simulation import Simulation, Workload
from step_costs import Calibration

from optimum_neuron import progress
from optimum_neuron.cli import add_option, reported_errors
from optimum_neuron.config import NeuronConfig
from optimum_neuron.engine.policy import Policy, SchedulerOptions


POLICIES: tuple[Policy, ...] = ("mixed", "alternate", "prefill_first", "all_chunks")
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
EXAMPLES = """
calibration files hold one JSON object, either with the parts of a step in milliseconds
  {"weights_ms": 20, "row_ms": 0.14, "token_ms": 0.125, "mixed_ms": 3, "attention_ms": 0.5, "context_length": 4096}
or with measured steps, to which the parts are fitted
  {"steps": [{"kind": "token_generation", "batch_size": 32, "ms": 24.6},
             {"kind": "chunked_prefill", "ctx_batch_size": 1, "chunk_size": 1024, "ms": 148}, ...]}

examples:
  python benchmark/simulate.py                                                  # the calibration, then 32 users
  python benchmark/simulate.py --chunk-sizes 256 512 --itl-p99-ms 100 --ttft-p99-ms 3000
  python benchmark/simulate.py --users 1000 --replicas 16 24 32 --policies mixed --ttft-p99-ms 2000
  python benchmark/simulate.py --rate 1.5 --prompt-tokens 3000 --batch-sizes 8 16 32
  python benchmark/simulate.py --decode-ms 12 --chunk-ms 60 --chunk-tokens 512 --host-ms 1

Tables and, as the last line, one JSON object go to stdout; progress and warnings to stderr.
"""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _add_system_options(parser.add_argument_group("what to compare: one row per combination"))
    _add_load_options(parser.add_argument_group("load"))
    _add_cost_options(parser.add_argument_group("step costs"))
    goal = parser.add_argument_group("objective and files")
    add_option(goal, "--itl-p99-ms", type=_above_zero, metavar="MS", help="longest 99th percentile between two tokens")
    add_option(
        goal, "--ttft-p99-ms", type=_above_zero, metavar="MS", help="longest 99th percentile to the first token"
    )
    add_option(goal, "--json", type=Path, metavar="FILE", help="write the JSON object here as well")
    plot_file = Path("build/benchmark/simulate.png")
    add_option(goal, "--plot", type=Path, metavar="FILE.png", default=plot_file, help="the plot to write")
    args = parser.parse_args(arguments)
    if (args.decode_ms is None) != (args.chunk_ms is None):
        parser.error("--decode-ms and --chunk-ms need each other: give both, or neither")
    if args.calibration and args.decode_ms:
        parser.error(
            f"--calibration {args.calibration} and --decode-ms {args.decode_ms:g} contradict: give one of them"
        )
    if args.rate and args.users:
        parser.error(f"--rate {args.rate:g} has no users, but --users gives {args.users}: give one of them")
    if args.rate and args.ramp is not None:
        parser.error(f"--ramp {args.ramp:g} spreads users, but --rate {args.rate:g} has none: leave out --ramp")
    return args


def _add_system_options(group: argparse._ArgumentGroup) -> None:
    many = {"type": _positive, "nargs": "+", "metavar": "N"}
    add_option(group, "--policies", nargs="+", choices=POLICIES, default=list(POLICIES), help="how steps are filled")
    add_option(group, "--chunk-sizes", **many, default=[128, 256, 512, 1024], help="prefill_chunk_size")
    buckets_help = "prefill_chunk_buckets: sizes compiled beside each chunk size that is larger"
    add_option(group, "--chunk-buckets", **{**many, "nargs": "*"}, default=[], help=buckets_help)
    add_option(group, "--batch-sizes", **many, default=[32], help="batch_size: requests that have a slot at a time")
    add_option(group, "--ctx-batch-sizes", **many, default=[1], help="ctx_batch_size: chunk rows of a step")
    add_option(
        group,
        "--replicas",
        **many,
        default=[1],
        help=f"engines that share the load evenly; {SIMULATED_REPLICAS} of them stand for more",
    )
    add_option(group, "--sequence-length", type=_positive, metavar="TOKENS", default=4096, help="of a slot")
    target_help = "itl_target_ms of the scheduler: it then chooses among --chunk-buckets by measured times"
    add_option(group, "--itl-target-ms", type=_above_zero, metavar="MS", help=target_help)


def _add_load_options(group: argparse._ArgumentGroup) -> None:
    users_help = "each sends its next request when its last one finished (default: 32, unless there is a --rate)"
    add_option(group, "--users", type=_positive, nargs="+", metavar="N", help=users_help)
    ramp_help = "seconds over which the users' first requests spread (default: 20)"
    add_option(group, "--ramp", type=_not_negative, metavar="SECONDS", help=ramp_help)
    add_option(
        group, "--rate", type=_above_zero, metavar="PER_SECOND", help="requests at random times instead of users"
    )
    requests_help = f"that finish on a replica (default: one of each of its users, at least {LEAST_REQUESTS})"
    add_option(group, "--requests", type=_positive, metavar="N", help=requests_help)
    add_option(group, "--prompt-tokens", type=_positive, metavar="TOKENS", default=1500, help="mean")
    add_option(group, "--new-tokens", type=_at_least_two, metavar="TOKENS", default=250, help="mean")
    spread_help = "standard deviation of both, as a share of the mean"
    add_option(group, "--spread", type=_not_negative, metavar="SHARE", default=0.2, help=spread_help)
    prefix_help = "tokens with which all prompts start alike, and which the scheduler may reuse; 0: no reuse"
    add_option(group, "--shared-prefix", type=_whole, metavar="TOKENS", default=0, help=prefix_help)
    add_option(group, "--seed", type=_whole, metavar="SEED", default=0, help="of lengths and arrivals")


def _add_cost_options(group: argparse._ArgumentGroup) -> None:
    add_option(group, "--decode-ms", type=_above_zero, metavar="MS", help="measured time of a decode step")
    add_option(group, "--decode-rows", type=_positive, metavar="ROWS", default=32, help="batch size of --decode-ms")
    add_option(group, "--chunk-ms", type=_above_zero, metavar="MS", help="measured time of a chunk step")
    add_option(group, "--chunk-tokens", type=_positive, metavar="TOKENS", default=1024, help="tokens of --chunk-ms")
    add_option(group, "--calibration", type=Path, metavar="FILE.json", help="parts of a step, or measured steps")
    add_option(group, "--host-ms", type=_not_negative, metavar="MS", default=0.0, help="added to every step")


def _number(text: str, kind: Callable[[str], float], what: str, least: float) -> float:
    try:
        value = kind(text)
    except ValueError:
        value = -1
    if not least <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value


def _whole(text: str) -> int:
    return int(_number(text, int, "a whole number of at least 0", 0))


def _positive(text: str) -> int:
    return int(_number(text, int, "a whole number of at least 1", 1))


def _at_least_two(text: str) -> int:
    return int(_number(text, int, "a whole number of at least 2: the first token has none before it", 2))


def _not_negative(text: str) -> float:
    return _number(text, float, "a number of at least 0", 0.0)


def _above_zero(text: str) -> float:
    return _number(text, float, "a number above 0", sys.float_info.min)


def main(arguments: list[str] | None = None) -> int:
    """Runs the sweep; returns the exit code."""
    args = parse_arguments(arguments)
    with reported_errors():
        calibration = _calibration(args)
        rows = run(args, calibration)
        checks = check() if calibration == Calibration() else []
        objective = Objective(args.itl_p99_ms, args.ttft_p99_ms)
        report = Report(calibration, checks, _workload(args, 1), rows, objective)
        print_report(report)
        publish(report.to_json(), lambda: plot(report, args.plot), args.json)
    return 0


def _calibration(args: argparse.Namespace) -> Calibration:
    calibration = Calibration()
    if args.calibration:
        calibration = Calibration.from_file(args.calibration)
    elif args.decode_ms:
        calibration = Calibration.from_times(
            args.decode_ms, args.decode_rows, args.chunk_ms, args.chunk_tokens, source="--decode-ms and --chunk-ms"
        )
    return replace(calibration, launch_ms=calibration.launch_ms + args.host_ms)


def _workload(args: argparse.Namespace, users: int) -> Workload:
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


def check() -> list[Check]:
    """The published run under the policy of those who measured it: all chunks of a prompt between two decode steps."""
    setting = Setting(32, 1, "all_chunks", 32, 1024, 1)
    options = SchedulerOptions(policy="all_chunks", prefix_reuse=False)
    rows = []
    for name, workload in CHECKED.items():
        config = _config(setting, 4096, [])
        row = Row.of(setting, config, [Simulation(config, options, Calibration(), workload).run()])
        simulated = (row.tok_s, row.itl_mean_ms, row.ttft_mean_ms)
        rows.append(Check(name, PUBLISHED, dict(zip(PUBLISHED, simulated, strict=True))))
    return rows


def run(args: argparse.Namespace, calibration: Calibration) -> list[Row]:
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
            outcomes = [Simulation(config, options, calibration, share, on_finish).run() for share in shares]
            rows.append(Row.of(setting, config, outcomes))
    return rows


def _cases(args: argparse.Namespace) -> Iterator[tuple[Setting, NeuronConfig, SchedulerOptions, Workload]]:
    refused: list[str] = []
    done = 0
    axes = (args.replicas, args.policies, args.batch_sizes, args.chunk_sizes, args.ctx_batch_sizes)
    for setting in (Setting(*values) for values in product([0] if args.rate else args.users or [32], *axes)):
        workload = _workload(args, setting.users)
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
        sys.stderr.write(f"warning: left out {line}\n")


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


if __name__ == "__main__":
    sys.exit(main())
