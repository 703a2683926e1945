# SPDX-License-Identifier: Apache-2.0
"""How fast prompts are taken in by the size of a chunk: small chunks stall decoding for less, and read the weights more often.

One prompt at a time through generate(), in artifacts of one slot that differ in their chunks alone. All cases take turns.
"""

from __future__ import annotations

import json
import statistics
import sys
from argparse import Namespace
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from optimum_neuron.cli import add_option, reported_errors

from ..machine import describe_machine, warn_if_busy
from ..options import add_file_options, add_model_options, artifacts_folder, make_parser, positive
from ..output import console, make_table, publish


if TYPE_CHECKING:
    from ..systems import System

EXAMPLES = """
examples:
  python -m benchmark.generate.chunks --artifacts build/artifacts --json build/benchmark/chunks.json
  python -m benchmark.generate.chunks --chunk-sizes 8 16 --prompt-lengths 32 --rounds 1      # does it run?
"""


def parse_arguments() -> Namespace:
    """The options; needs no torch, so that --help is quick."""
    parser = make_parser("generate.chunks", __doc__, EXAMPLES)
    what = parser.add_argument_group("what to measure")
    add_model_options(what)
    several: dict[str, Any] = {"type": positive, "nargs": "+", "metavar": "TOKENS"}
    add_option(what, "--chunk-sizes", **several, default=[64, 128, 512], help="an artifact for each")
    add_option(what, "--prompt-lengths", **several, default=[512, 2048], help="of the prompts")
    add_option(what, "--rounds", type=positive, metavar="ROUNDS", default=5, help="of all cases in turn")
    add_file_options(parser)
    args = parser.parse_args()
    args.chunk_sizes, args.prompt_lengths = sorted(set(args.chunk_sizes)), sorted(set(args.prompt_lengths))
    return args


def main() -> int:
    """Runs the benchmark; returns the exit code."""
    args = parse_arguments()
    with reported_errors():
        from ..model import default_model, export
        from ..systems import artifact_config, load_ours

        warn_if_busy()
        with artifacts_folder(args.artifacts) as folder:
            config = artifact_config(args.dtype, "cpu", 1, args.prompt_lengths[-1] + 1)
            model, systems = args.model or default_model(), {}
            for size in args.chunk_sizes:
                sized = replace(config, prefill_chunk_size=size, prefill_chunk_buckets=())
                systems[size] = load_ours(export(model, sized, folder).path)
            report = {
                "benchmark": "chunks",
                "dtype": args.dtype,
                "machine": describe_machine(),
                "prompts": table_of(measure(systems, args), args),
            }
        publish(json.dumps(report), args.json)
    return 0


def measure(systems: dict[int, System], args: Namespace) -> dict[tuple[int, int], float]:
    """Prompt tokens per second until the first new one, by prompt and chunk: medians over rounds, of which a first does not count."""
    import torch

    from ..systems import timed_call

    random = torch.Generator().manual_seed(0)
    speeds: dict[tuple[int, int], list[float]] = {}
    for number in range(args.rounds + 1):
        for length in args.prompt_lengths:
            prompt = torch.randint(
                3, systems[args.chunk_sizes[0]].model.config.vocab_size, (1, length), generator=random
            )
            for size, system in systems.items():
                speed = length / timed_call(system, prompt, 1).first_token
                if number:
                    speeds.setdefault((length, size), []).append(speed)
    return {case: statistics.median(each) for case, each in speeds.items()}


def table_of(speeds: dict[tuple[int, int], float], args: Namespace) -> list[dict[str, object]]:
    """Prints and returns them, with shares of the largest chunk's."""
    table = make_table("Prefill by chunk", (), ("prompt", "chunk", "tok/s", "of the largest chunk's"))
    results: list[dict[str, object]] = []
    for (length, size), speed in speeds.items():
        share = speed / speeds[length, args.chunk_sizes[-1]]
        results.append({"prompt": length, "chunk": size, "tokens_per_s": speed, "of_largest": share})
        table.add_row(f"{length:,}", f"{size:,}", f"{speed:,.0f}", f"{share:.2f}")
    console().print(table)
    return results


if __name__ == "__main__":
    sys.exit(main())
