# SPDX-License-Identifier: Apache-2.0
"""The options of a simulation, and which of them contradict each other."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from optimum_neuron.cli import add_option
from optimum_neuron.engine.policy import Policy

from ..options import above_zero, add_result_options, at_least, make_parser, not_negative, positive
from .sweep import LEAST_REQUESTS, SIMULATED_REPLICAS


POLICIES: tuple[Policy, ...] = ("mixed", "alternate", "prefill_first", "all_chunks")
EXAMPLES = """
calibration files hold one JSON object, either with the parts of a step in milliseconds
  {"weights_ms": 20, "row_ms": 0.14, "token_ms": 0.125, "mixed_ms": 3, "attention_ms": 0.5, "context_length": 4096}
or with measured steps, to which the parts are fitted
  {"steps": [{"kind": "token_generation", "batch_size": 32, "ms": 24.6},
             {"kind": "chunked_prefill", "ctx_batch_size": 1, "chunk_size": 1024, "ms": 148}, ...]}

examples:
  python -m benchmark.simulate                                                  # the calibration, then 32 users
  python -m benchmark.simulate --chunk-sizes 256 512 --itl-p99-ms 100 --ttft-p99-ms 3000
  python -m benchmark.simulate --users 1000 --replicas 16 24 32 --policies mixed --ttft-p99-ms 2000
  python -m benchmark.simulate --rate 1.5 --prompt-tokens 3000 --batch-sizes 8 16 32
  python -m benchmark.simulate --decode-ms 12 --chunk-ms 60 --chunk-tokens 512 --host-ms 1

Tables and, as the last line, one JSON object go to stdout; progress and warnings to stderr.
"""


def parse_arguments(description: str | None, arguments: list[str] | None) -> Namespace:
    """The options."""
    parser = make_parser("simulate", description, EXAMPLES)
    _add_system_options(parser.add_argument_group("what to compare: one row per combination"))
    _add_load_options(parser.add_argument_group("load"))
    _add_cost_options(parser.add_argument_group("step costs"))
    goal = parser.add_argument_group("objective and files")
    add_option(goal, "--itl-p99-ms", type=above_zero, metavar="MS", help="longest 99th percentile between two tokens")
    add_option(goal, "--ttft-p99-ms", type=above_zero, metavar="MS", help="longest 99th percentile to the first token")
    add_result_options(goal)
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


def _add_system_options(group: Any) -> None:
    many = {"type": positive, "nargs": "+", "metavar": "N"}
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
    add_option(group, "--sequence-length", type=positive, metavar="TOKENS", default=4096, help="of a slot")
    target_help = "itl_target_ms of the scheduler: it then chooses among --chunk-buckets by measured times"
    add_option(group, "--itl-target-ms", type=above_zero, metavar="MS", help=target_help)


def _add_load_options(group: Any) -> None:
    users_help = "each sends its next request when its last one finished (default: 32, unless there is a --rate)"
    add_option(group, "--users", type=positive, nargs="+", metavar="N", help=users_help)
    ramp_help = "seconds over which the users' first requests spread (default: 20)"
    add_option(group, "--ramp", type=not_negative, metavar="SECONDS", help=ramp_help)
    add_option(
        group, "--rate", type=above_zero, metavar="PER_SECOND", help="requests at random times instead of users"
    )
    requests_help = f"that finish on a replica (default: one of each of its users, at least {LEAST_REQUESTS})"
    add_option(group, "--requests", type=positive, metavar="N", help=requests_help)
    add_option(group, "--prompt-tokens", type=positive, metavar="TOKENS", default=1500, help="mean")
    # The first token has none before it.
    add_option(group, "--new-tokens", type=at_least(2), metavar="TOKENS", default=250, help="mean")
    spread_help = "standard deviation of both, as a share of the mean"
    add_option(group, "--spread", type=not_negative, metavar="SHARE", default=0.2, help=spread_help)
    prefix_help = "tokens with which all prompts start alike, and which the scheduler may reuse; 0: no reuse"
    add_option(group, "--shared-prefix", type=at_least(0), metavar="TOKENS", default=0, help=prefix_help)
    add_option(group, "--seed", type=at_least(0), metavar="SEED", default=0, help="of lengths and arrivals")


def _add_cost_options(group: Any) -> None:
    add_option(group, "--decode-ms", type=above_zero, metavar="MS", help="measured time of a decode step")
    add_option(group, "--decode-rows", type=positive, metavar="ROWS", default=32, help="batch size of --decode-ms")
    add_option(group, "--chunk-ms", type=above_zero, metavar="MS", help="measured time of a chunk step")
    add_option(group, "--chunk-tokens", type=positive, metavar="TOKENS", default=1024, help="tokens of --chunk-ms")
    add_option(group, "--calibration", type=Path, metavar="FILE.json", help="parts of a step, or measured steps")
    add_option(group, "--host-ms", type=not_negative, metavar="MS", default=0.0, help="added to every step")
