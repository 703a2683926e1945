# SPDX-License-Identifier: Apache-2.0
"""Measures a cache of blocks against slots of the same memory: users whose requests are of very different lengths.

Most requests are short and a few are long, as lengths of a lognormal distribution are. Slots hold as many requests as the memory holds of
the longest; blocks as many as there are rows and tokens for. Both serve by the engine in this process (engine) and, where vLLM is
installed, by vLLM with an engine process of its own (vLLM), which takes the artifacts with its defaults. All have the same requests, in turn,
round after round. New tokens per second and pauses between tokens (ITL) are counted from when all rows are taken until the last
request comes, the time to the first token (TTFT) over all requests.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from optimum_neuron.cli import add_option, reported_errors

from ..machine import check_vllm, version_of, warn_if_busy
from ..options import add_file_options, add_model_options, artifacts_folder, make_parser, not_negative, positive
from ..output import publish


if TYPE_CHECKING:
    from optimum_neuron.config import NeuronConfig

    from .report import Results
    from .servers import Server

ENGINE, VLLM = "engine", "vLLM"
SLOTS = "slots"
EXAMPLES = """
examples:
  .venv-vllm/bin/python -m benchmark.serving.blocks --artifacts build/artifacts --json build/benchmark/blocks.json
  python -m benchmark.serving.blocks --through engine --block-sizes 64 128 256 512        # which block size
  python -m benchmark.serving.blocks --through engine --requests 24 --users 8 --rows 8 --repeats 1   # does it run?

Tables and, as the last line, one JSON object go to stdout; progress and warnings to stderr.
"""


def parse_arguments() -> Namespace:
    """The options; needs no torch, so that --help is quick."""
    parser = make_parser("serving.blocks", __doc__, EXAMPLES)
    what = parser.add_argument_group("what to measure")
    add_model_options(what)
    sizes_help = "tokens of a block, a system for each"
    add_option(what, "--block-sizes", type=positive, nargs="+", metavar="TOKENS", default=[128], help=sizes_help)
    through_help = "who serves (default: both where vLLM is installed, else the engine)"
    add_option(what, "--through", choices=(ENGINE, VLLM), nargs="+", default=None, help=through_help)
    size = parser.add_argument_group("sizes")
    add_option(size, "--slots", type=positive, metavar="ROWS", default=4, help="of the systems with slots")
    add_option(size, "--rows", type=positive, metavar="ROWS", default=24, help="of those with blocks")
    length_help = "of the longest request; the cache has --slots times as many tokens"
    add_option(size, "--sequence-length", type=positive, metavar="TOKENS", default=2048, help=length_help)
    chunk_help = "prompt tokens of a step, with slots"
    add_option(size, "--chunk-size", type=positive, metavar="TOKENS", default=128, help=chunk_help)
    block_chunk_help = "the same with blocks: fewer, as more rows decode beside them"
    add_option(size, "--block-chunk-size", type=positive, metavar="TOKENS", default=48, help=block_chunk_help)
    add_option(size, "--users", type=positive, metavar="USERS", default=32, help="requests that wait or run")
    add_option(size, "--requests", type=positive, metavar="COUNT", default=96, help="of all users")
    add_option(size, "--prompt", type=positive, metavar="TOKENS", default=60, help="the median of prompts")
    add_option(size, "--new-tokens", type=positive, metavar="TOKENS", default=80, help="the median of answers")
    tail_help = "sigma of both lognormal distributions; 0: all lengths within a fifth of these"
    add_option(size, "--tail", type=not_negative, metavar="SIGMA", default=0.9, help=tail_help)
    add_option(size, "--repeats", type=positive, metavar="ROUNDS", default=3, help="rounds, all systems in turn")
    add_option(size, "--seed", type=int, metavar="SEED", default=0, help="of the random prompts and lengths")
    add_file_options(parser)
    args = parser.parse_args()
    if args.users < max(args.rows, args.slots):
        parser.error(f"--users {args.users} do not fill --rows {args.rows} and --slots {args.slots}: raise --users")
    if args.requests <= args.users:
        parser.error(
            f"--requests {args.requests} all come at once with --users {args.users}, and what is measured ends with the last one that "
            f"comes: raise --requests, or lower --users"
        )
    return args


def main() -> int:
    """Runs the benchmark; returns the exit code."""
    args = parse_arguments()
    if args.through is None:
        args.through = [ENGINE, VLLM] if importlib.util.find_spec("vllm") else [ENGINE]
    os.environ.update(VLLM_PLUGINS="optimum_neuron", VLLM_NO_USAGE_STATS="1", VLLM_WORKER_MULTIPROC_METHOD="spawn")
    os.environ.update(VLLM_LOGGING_STREAM="ext://sys.stderr", VLLM_LOGGING_LEVEL="WARNING")
    with reported_errors():
        from .report import BLOCKS

        if VLLM in args.through:
            check_vllm()
        warn_if_busy()
        with artifacts_folder(args.artifacts) as folder:
            results = run(args, folder)
        report = results.to_dict()
        BLOCKS.show(report)
        publish(report, args.json)
    return 0


def run(args: Namespace, folder: Path) -> Results:
    """Exports an artifact for each system, and lets them serve the same users in turn."""
    from dataclasses import replace

    from optimum_neuron import progress

    from ..model import default_model, export
    from .report import Results
    from .workloads import Users

    checkpoint = args.model or default_model()
    configs = configurations(args)
    artifacts = {}
    with progress.stage("Exporting", len(configs)) as advance:
        for name, config in configs.items():
            artifacts[name] = export(checkpoint, config, folder).path
            advance(name)
    results = Results.of("blocks", checkpoint, args)
    if VLLM in args.through:
        results.machine["vllm"] = version_of(Path(sys.executable), "vllm")
    lengths = args.prompt, args.new_tokens
    users = Users(args.users, args.requests, *lengths, tail=args.tail, longest=configs[SLOTS].sequence_length)
    with ExitStack() as opened:
        servers = [
            open_server(through, name, path, opened) for through in args.through for name, path in artifacts.items()
        ]
        results.measure("users", users, servers, warm_up=replace(users, requests=args.users + 1, new_tokens=8))
    return results


def configurations(args: Namespace) -> dict[str, NeuronConfig]:
    """By name; the caches of all hold the same number of tokens."""
    from ..model import serving_config

    slots = serving_config(args.slots, args.sequence_length, args.chunk_size, args.dtype)
    cache_tokens = args.slots * slots.sequence_length
    return {SLOTS: slots} | {
        f"blocks of {size}": serving_config(
            args.rows,
            args.sequence_length,
            args.block_chunk_size,
            args.dtype,
            kv_block_size=size,
            kv_cache_tokens=cache_tokens,
        )
        for size in args.block_sizes
    }


def open_server(through: str, name: str, artifact: Path, opened: ExitStack) -> Server:
    """A system, which ends with `opened`."""
    from optimum_neuron.engine.policy import SchedulerOptions
    from optimum_neuron.generate import NeuronModelForCausalLM

    from .servers import OurServer

    title = f"{through}: {name}"
    if through == ENGINE:
        return OurServer(title, NeuronModelForCausalLM.from_pretrained(artifact), SchedulerOptions())
    from .vllm_server import VllmServer

    server = VllmServer(title, artifact)
    opened.callback(server.close)
    return server


if __name__ == "__main__":
    sys.exit(main())
