# SPDX-License-Identifier: Apache-2.0
"""Measures serving: how long decoding pauses when a long prompt comes, under each policy and in transformers.

Four scenarios, each served by every system in turn, on the same random prompts, in one process:

stall    some requests decode and one long prompt comes: the pauses between their tokens (inter-token latency, ITL) until
         the newcomer's first token, its time to that token (TTFT), and all new tokens per second of the whole run
users    users who each send a new request when their last one is finished: the same numbers over all requests
behind   short prompts come behind the long one: their TTFT, with and without the right to pass it
packing  many short prompts: one chunk row of 4 * C tokens, 4 rows of C tokens, and one row of C tokens

The policies run on one artifact. mixed decodes and takes in prompts in the same step; alternate does so in turn;
prefill_first takes in all prompts before it decodes; all_chunks takes in a whole prompt between two decode steps.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from optimum_neuron.cli import add_option, reported_errors

from ..machine import warn_if_busy
from ..options import (
    add_file_options,
    add_model_options,
    artifacts_folder,
    at_least,
    make_parser,
    positive,
)
from ..output import publish


if TYPE_CHECKING:
    from optimum_neuron.generate import NeuronModelForCausalLM

    from .report import Results
    from .servers import OurServer

POLICIES = ("mixed", "alternate", "prefill_first", "all_chunks")
SCENARIOS = ("stall", "users", "behind", "packing")
PACKED_ROWS = 4
EXAMPLES = """
examples:
  python -m benchmark.serving.stall --artifacts build/artifacts --json build/benchmark/stall.json
  python -m benchmark.serving.stall --scenarios stall --chunk-size 32 --no-peer
  python -m benchmark.serving.stall --long-prompt 256 --repeats 1 --no-peer      # does it run?

Tables and, as the last line, one JSON object go to stdout; progress and warnings to stderr.
"""


def parse_arguments() -> Namespace:
    """The options; needs no torch, so that --help is quick."""
    parser = make_parser("serving.stall", __doc__, EXAMPLES)
    what = parser.add_argument_group("what to measure")
    add_model_options(what)
    add_option(what, "--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS), help="which of them")
    add_option(what, "--policies", nargs="+", choices=POLICIES, default=list(POLICIES), help="which of them")
    add_option(what, "--no-peer", action="store_true", help="leave out transformers' continuous batching")
    size = parser.add_argument_group("sizes")
    # One decodes, one is the newcomer, one passes it.
    add_option(size, "--slots", type=at_least(3), metavar="ROWS", default=4, help="requests at a time")
    add_option(size, "--chunk-size", type=positive, metavar="TOKENS", default=24, help="prompt tokens of a step")
    add_option(size, "--long-prompt", type=positive, metavar="TOKENS", default=2048, help="of the newcomer")
    add_option(size, "--short-prompt", type=positive, metavar="TOKENS", default=512, help="of those that decode")
    add_option(size, "--users", type=positive, metavar="USERS", default=8, help="of the scenario users")
    add_option(size, "--requests", type=positive, metavar="COUNT", default=32, help="of all users")
    add_option(size, "--repeats", type=positive, metavar="ROUNDS", default=5, help="rounds, all systems in turn")
    add_option(size, "--seed", type=int, metavar="SEED", default=0, help="of the random prompts")
    add_file_options(parser)
    args = parser.parse_args()
    if "packing" in args.scenarios and args.slots < PACKED_ROWS:
        parser.error(
            f"--slots {args.slots} is fewer than the {PACKED_ROWS} chunk rows of the scenario packing: raise it, or name other "
            f"--scenarios"
        )
    return args


def main() -> int:
    """Runs the benchmark; returns the exit code."""
    args = parse_arguments()
    with reported_errors():
        from .report import STALL

        warn_if_busy()
        with artifacts_folder(args.artifacts) as folder:
            results = run(args, folder)
        report = results.to_dict()
        STALL.show(report)
        publish(report, args.json)
    return 0


def run(args: Namespace, folder: Path) -> Results:
    """Exports what the scenarios need, then lets all systems serve each workload in turn."""
    from ..model import default_model
    from .report import Results
    from .workloads import Users

    checkpoint = args.model or default_model()
    results = Results.of("stall", checkpoint, args)
    if set(args.scenarios) & {"stall", "users", "behind"}:
        measure_policies(results, checkpoint, args, folder)
    if "packing" in args.scenarios:
        short_prompts = Users(args.slots * 4, args.slots * 8, 40, 8)
        results.measure("packing", short_prompts, packing_servers(checkpoint, args, folder))
    return results


def measure_policies(results: Results, checkpoint: str, args: Namespace, folder: Path) -> None:
    """The scenarios that run on one artifact under several policies."""
    from optimum_neuron.engine.policy import SchedulerOptions

    from ..model import load_transformers
    from .servers import OurServer, TransformersServer
    from .workloads import Behind, Stall, Users

    stall = Stall(args.slots - 1, args.short_prompt, args.long_prompt, 16, 96, 16)
    longest = max(args.long_prompt, args.short_prompt) + stall.warm_tokens + stall.after_tokens
    model = open_artifact(checkpoint, args, folder, args.chunk_size, 1, longest)
    ours = [OurServer(policy, model, SchedulerOptions(policy=policy)) for policy in args.policies]
    peers = []
    if not args.no_peer:
        loaded, tokens = load_transformers(checkpoint, args.dtype), args.slots + args.chunk_size
        peers = [TransformersServer("transformers", loaded, tokens, args.slots, args.slots * longest)]
    if "stall" in args.scenarios:
        results.measure("stall", stall, [*ours, *peers])
    if "users" in args.scenarios:
        users = Users(args.users, args.requests, args.long_prompt // 6, args.long_prompt // 32)
        results.measure("users", users, [*ours, *peers])
    if "behind" in args.scenarios:
        waiting = SchedulerOptions(policy="mixed", max_bypass=0)
        servers = [
            OurServer("mixed", model, SchedulerOptions(policy="mixed")),
            OurServer("mixed, no passing", model, waiting),
        ]
        fewer = Stall(args.slots - 2, args.short_prompt, args.long_prompt, 16, 96, 16)
        results.measure("behind", Behind(fewer, 6, 0.15), servers)


def packing_servers(checkpoint: str, args: Namespace, folder: Path) -> list[OurServer]:
    """The same tokens per step as one row or as several, and one of the small rows alone."""
    from optimum_neuron.engine.policy import SchedulerOptions

    from .servers import OurServer

    servers = []
    size, longest = args.chunk_size, 1024
    for rows, chunk in ((1, PACKED_ROWS * size), (PACKED_ROWS, size), (1, size)):
        model = open_artifact(checkpoint, args, folder, chunk, rows, longest)
        servers.append(OurServer(f"{rows} x {chunk}", model, SchedulerOptions()))
    return servers


def open_artifact(
    checkpoint: str, args: Namespace, folder: Path, chunk: int, rows: int, longest: int
) -> NeuronModelForCausalLM:
    """Exports and loads the artifact that a scenario runs on."""
    from optimum_neuron import progress
    from optimum_neuron.generate import NeuronModelForCausalLM

    from ..model import export, serving_config

    with progress.stage("Exporting"):
        path = export(checkpoint, serving_config(args.slots, longest, chunk, args.dtype, rows), folder).path
    return NeuronModelForCausalLM.from_pretrained(path)


if __name__ == "__main__":
    sys.exit(main())
