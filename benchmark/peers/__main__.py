# SPDX-License-Identifier: Apache-2.0
"""Compares this runtime with those that a user would choose instead on a CPU, in one run, in turn, round after round.

Every runtime has an environment and a process of its own, the same weights, token ids and number of threads. Prompts are
random and never the same twice, and no runtime keeps prefixes. Measured are prefill of one prompt, a decode step of several rows, a load of
requests with mixed lengths, and what it takes to begin: conversion, load, the first token from a cold start, memory.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimum_neuron.cli import add_option, reported_errors

from ..options import add_result_options, make_parser, positive, recorded
from .names import AVX2, MODELS, OURS, PEERS, PRECISIONS, RANDOM_1B, SMOLLM2
from .results import WEIGHT_BITS, Group, Prompts, Shape, cases, longest_row
from .workers.protocol import Sizes


if TYPE_CHECKING:
    from .prepare import Workshop

Checks = tuple[list[list[int]], list[list[int]]]
# Of a whole run, and of a quick one.
DEFAULTS: dict[str, tuple[Any, Any]] = {
    "models": (list(MODELS), [SMOLLM2]),
    "precisions": (list(PRECISIONS), ["bfloat16"]),
    "prompts": ([128, 512, 2048], [128, 512]),
    "batches": ([1, 4, 8, 32], [1, 8]),
    "requests": ([12, 32], [12]),
    "rounds": (5, 2),
}
EXAMPLES = f"""
peers:
{chr(10).join(f"  {peer.name:23}{peer.label}" for peer in PEERS.values() if peer.name != OURS)}
  benchmark/README.md says what each does in which precision.

examples:
  python -m benchmark.peers --json build/benchmark/peers.json
  python -m benchmark.peers --quick        # SmolLM2 alone, few rounds and rows
  python -m benchmark.peers --models {SMOLLM2} --precisions float32 --peers llamacpp openvino --rounds 3
  python -m benchmark.peers --models {RANDOM_1B} --precisions int8 int4 --peers llamacpp openvino onnxruntime        # a Llama of 1.2 billion weights
  python -m benchmark.peers --instruction-set avx2        # plays a CPU without AVX512

The first run installs the peers' environments (6.5 GB) and builds llama.cpp, which takes a C++ compiler. A peer that does not install, or
fails, is named with its reason; the others are measured all the same.
"""


def parse_arguments() -> Namespace:
    """Return the options; imports nothing heavy, so that --help is quick."""
    parser = make_parser("peers", __doc__, EXAMPLES)
    defaults = {name: both["--quick" in sys.argv] for name, both in DEFAULTS.items()}
    what = parser.add_argument_group("what to measure")
    add_option(what, "--quick", action="store_true", help="fewer of everything that is not named otherwise")
    add_option(what, "--models", nargs="+", choices=MODELS, default=defaults["models"], help="which models")
    add_option(what, "--precisions", nargs="+", choices=PRECISIONS, default=defaults["precisions"], help="of weights")
    others = [name for name in PEERS if name != OURS]
    add_option(what, "--peers", nargs="*", choices=others, default=others, help=f"next to {OURS}")
    set_help = "hold all of them to less than this CPU has; the output names those that cannot be held"
    add_option(what, "--instruction-set", choices=("avx2",), default=None, help=set_help)
    size = parser.add_argument_group("sizes")
    one: dict[str, Any] = {"type": positive}
    several: dict[str, Any] = {"type": positive, "nargs": "+"}
    add_option(size, "--prompts", **several, metavar="TOKENS", default=defaults["prompts"], help="prefill of each")
    add_option(size, "--batches", **several, metavar="ROWS", default=defaults["batches"], help="a decode step of each")
    add_option(
        size, "--requests", **several, metavar="COUNT", default=defaults["requests"], help="of a mixed load each"
    )
    add_option(size, "--rounds", **one, metavar="ROUNDS", default=defaults["rounds"], help="of all in turn")
    cores = len(os.sched_getaffinity(0))
    add_option(size, "--threads", **one, metavar="THREADS", default=cores, help="of every runtime")
    files = parser.add_argument_group("files")
    folder_help = "environments, checkpoints and conversions, for the next run"
    add_option(files, "--folder", type=Path, metavar="FOLDER", default=Path("build/peers"), help=folder_help)
    add_result_options(files)
    args = parser.parse_args()
    args.batches, args.prompts = sorted(set(args.batches)), sorted(set(args.prompts))
    if args.threads > cores:
        parser.error(f"--threads {args.threads} is more than the {cores} cores of this machine: lower it")
    return args


def main() -> int:
    """Run the benchmark; return the exit code."""
    args = parse_arguments()
    os.environ |= {"OMP_NUM_THREADS": str(args.threads)} | (AVX2 if args.instruction_set else {})  # before torch comes
    with reported_errors():
        from ..machine import warn_if_busy
        from .report import SECTION

        warn_if_busy()
        SECTION.finish(run(args), args.json)
    return 0


def run(args: Namespace) -> dict[str, Any]:
    """Prepare everything once, then measure model by model and precision by precision; return the report."""
    from optimum_neuron import progress

    from ..machine import describe_machine, measure_limits
    from .checkpoints import checkpoint_folder, write_gguf
    from .prepare import Workshop

    sizes = Sizes(args.batches, max(*args.batches, *args.requests), longest_row(args.prompts, args.batches))
    with progress.stage("Making environments"):
        workshop = Workshop.open(args.folder, [OURS, *args.peers], args.threads, sizes, bool(args.instruction_set))
    limits = measure_limits()
    groups: list[tuple[Group, Shape]] = []
    for model in args.models:
        with progress.stage(f"Preparing {model}"):
            checkpoint = checkpoint_folder(model, workshop.folder / "models")
            if "llamacpp" in workshop.pythons:
                write_gguf(checkpoint)
            checks, shape = workshop.checks(checkpoint), Shape.of(checkpoint)
        for precision in args.precisions:
            group = Group(model, precision, cases(args.prompts, args.batches, args.requests))
            measure_group(group, shape, workshop, checkpoint, checks, args.rounds)
            limits = limits.best(measure_limits())
            groups.append((group, shape))
    there = [PEERS[name] for name in workshop.pythons]
    beyond = [peer for peer in there if args.instruction_set and peer.beyond_avx2]
    return {
        "benchmark": "peers",
        "machine": describe_machine(),
        "options": recorded(args),
        "missing": workshop.missing,
        "notes": [
            *(f"Set, {peer.label}: {peer.settings}." for peer in there if peer.settings),
            *(f"{peer.label} is not held to avx2: {peer.beyond_avx2}." for peer in beyond),
        ],
        "limits": asdict(limits),
        "groups": [group.to_dict(limits, shape) for group, shape in groups],
    }


def measure_group(
    group: Group, shape: Shape, workshop: Workshop, checkpoint: Path, checks: Checks, rounds: int
) -> None:
    """Convert the checkpoint for each peer, then take all turns."""
    from optimum_neuron import progress

    from ..machine import measure_read, proc_bytes
    from .measure import Runner

    with progress.stage(f"Converting {group.model} to {group.precision}"):
        places = workshop.places(group, checkpoint)
    if not places:
        return
    # Twice the weights, and half a gigabyte for each worker.
    needed = len(places) * (2 * shape.weights * WEIGHT_BITS[group.precision] // 8 + (1 << 29))
    turns = rounds * len(places) * (1 + len(group.cases))
    with progress.stage(f"Measuring {group.model}, {group.precision}", turns) as advance:
        runner = Runner(group, places, Prompts(shape.vocab_size), checks, advance, measure_read)
        runner.run_rounds(rounds, together=needed < proc_bytes("/proc/meminfo", "MemAvailable"))


if __name__ == "__main__":
    sys.exit(main())
