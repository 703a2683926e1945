# SPDX-License-Identifier: Apache-2.0
"""Measures a cache of blocks against slots of the same memory: users whose requests are of very different lengths.

Most requests are short and a few are long, as lengths of a lognormal distribution are. Slots hold as many requests as the memory holds of
the longest; blocks as many as there are rows and tokens for. Each system serves the same requests in turn, round after round, in one
process: new tokens per second until the last request comes, so that all are at work, pauses between tokens (ITL), and
time to the first one (TTFT).
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from optimum_neuron.cli import add_option, reported_errors

from ..machine import warn_if_busy
from ..options import add_file_options, add_model_options, artifacts_folder, make_parser, not_negative, positive
from ..output import publish


if TYPE_CHECKING:
    from .report import Results

EXAMPLES = """
examples:
  python -m benchmark.serving.blocks --artifacts build/artifacts --json build/benchmark/blocks.json
  python -m benchmark.serving.blocks --block-sizes 64 128 256 512        # which block size
  python -m benchmark.serving.blocks --requests 24 --users 12 --repeats 1   # does it run?

Tables and, as the last line, one JSON object go to stdout; progress and warnings to stderr.
"""


def parse_arguments() -> Namespace:
    """The options; needs no torch, so that --help is quick."""
    parser = make_parser("serving.blocks", __doc__, EXAMPLES)
    what = parser.add_argument_group("what to measure")
    add_model_options(what)
    sizes = "tokens of a block, a system for each"
    add_option(what, "--block-sizes", type=positive, nargs="+", metavar="TOKENS", default=[128], help=sizes)
    size = parser.add_argument_group("sizes")
    add_option(size, "--slots", type=positive, metavar="ROWS", default=8, help="of the system with slots")
    add_option(size, "--rows", type=positive, metavar="ROWS", default=32, help="of those with blocks")
    length_help = "of the longest request; the cache has --slots times as many tokens"
    add_option(size, "--sequence-length", type=positive, metavar="TOKENS", default=2048, help=length_help)
    add_option(
        size, "--chunk-size", type=positive, metavar="TOKENS", default=64, help="prompt tokens of a step, of slots"
    )
    chunk_help = "the same of blocks: smaller, as more rows decode beside them"
    add_option(size, "--block-chunk-size", type=positive, metavar="TOKENS", default=32, help=chunk_help)
    add_option(size, "--users", type=positive, metavar="USERS", default=48, help="requests that wait or run")
    add_option(size, "--requests", type=positive, metavar="COUNT", default=144, help="of all users")
    add_option(size, "--prompt", type=positive, metavar="TOKENS", default=60, help="the median of prompts")
    add_option(size, "--new-tokens", type=positive, metavar="TOKENS", default=120, help="the median of answers")
    tail_help = "sigma of both lognormal distributions; 0: all lengths within a fifth of these"
    add_option(size, "--tail", type=not_negative, metavar="SIGMA", default=0.9, help=tail_help)
    add_option(size, "--repeats", type=positive, metavar="ROUNDS", default=3, help="rounds, all systems in turn")
    add_option(size, "--seed", type=int, metavar="SEED", default=0, help="of the random prompts and lengths")
    add_file_options(parser, plot=None)
    return parser.parse_args()


def main() -> int:
    """Runs the benchmark; returns the exit code."""
    args = parse_arguments()
    with reported_errors():
        from .report import print_tables

        warn_if_busy()
        with artifacts_folder(args.artifacts) as folder:
            results = run(args, folder)
        print_tables(results)
        publish(results.to_json(), args.json)
    return 0


def run(args: Namespace, folder: Path) -> Results:
    """Exports an artifact for each system, and lets them serve the same users in turn."""
    from dataclasses import replace

    from optimum_neuron import progress
    from optimum_neuron.engine.policy import SchedulerOptions
    from optimum_neuron.modeling import NeuronModelForCausalLM

    from ..model import default_model, export, serving_config
    from .report import Results
    from .servers import OurServer
    from .workloads import Users

    checkpoint = args.model or default_model()
    slots = serving_config(args.slots, args.sequence_length, args.chunk_size, args.dtype)
    configs = {f"{args.slots} slots": slots}
    for size in args.block_sizes:
        tokens = args.slots * slots.sequence_length
        configs[f"{args.rows} rows, blocks of {size}"] = replace(
            slots,
            batch_size=args.rows,
            kv_block_size=size,
            kv_cache_tokens=tokens,
            prefill_chunk_size=args.block_chunk_size,
        )
    servers = []
    for name, config in configs.items():
        with progress.stage("Exporting"):
            path = export(checkpoint, config, folder).path
        servers.append(OurServer(name, NeuronModelForCausalLM.from_pretrained(path), SchedulerOptions()))
    results = Results.of(checkpoint, args)
    users = Users(
        args.users, args.requests, args.prompt, args.new_tokens, tail=args.tail, longest=slots.sequence_length
    )
    results.measure("users", users, servers)
    return results


if __name__ == "__main__":
    sys.exit(main())
