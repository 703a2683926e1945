# SPDX-License-Identifier: Apache-2.0
"""What the first request of a slot takes, against later ones in the same slot: with and without the runner's warm-up.

Each case loads an artifact anew in this process. Without warm-up the system gives a slot's memory as the slot is first written.
"""

from __future__ import annotations

import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from optimum_neuron.cli import add_option, reported_errors

from ..machine import describe_machine, warn_if_busy
from ..options import (
    add_file_options,
    add_model_options,
    artifacts_folder,
    at_least,
    make_parser,
    positive,
    recorded,
)
from ..output import Table, digits
from ..section import Report, Section


if TYPE_CHECKING:
    from optimum_neuron.runtime.runner import GraphRunner

EXAMPLES = """
examples:
  python -m benchmark.generate.first_use --artifacts build/artifacts --json build/benchmark/first_use.json
  python -m benchmark.generate.first_use --slots 2 --prompt-length 8 --rounds 1      # does it run?
"""
SEQUENCE_LENGTH = 2048


def parse_arguments() -> Namespace:
    """Return the options; needs no torch, so that --help is quick."""
    parser = make_parser("generate.first_use", __doc__, EXAMPLES)
    what = parser.add_argument_group("what to measure")
    add_model_options(what)
    # The first slot is not counted.
    add_option(what, "--slots", type=at_least(2), metavar="SLOTS", default=16, help="of the artifact")
    add_option(what, "--prompt-length", type=positive, metavar="TOKENS", default=75, help="of each request")
    add_option(what, "--rounds", type=positive, metavar="ROUNDS", default=5, help="of later requests in all slots")
    add_file_options(parser)
    return parser.parse_args()


def main() -> int:
    """Run the benchmark; return the exit code."""
    args = parse_arguments()
    with reported_errors():
        from ..model import default_model, export, generate_config
        from ..systems import load_ours

        warn_if_busy()
        config = generate_config(args.dtype, args.slots, SEQUENCE_LENGTH)
        with artifacts_folder(args.artifacts) as folder:
            path = export(args.model or default_model(), config, folder).path
            results = [measure(load_ours(path).model.runner, args, warm_up=each) for each in (False, True)]
        report = {
            "benchmark": "first_use",
            "options": recorded(args),
            "machine": describe_machine(),
            "results": results,
        }
        SECTION.finish(report, args.json)
    return 0


def measure(runner: GraphRunner, args: Namespace, *, warm_up: bool) -> dict[str, Any]:
    """Return medians over all slots in ms: of first prompts, without the first slot, which finds the graph cold, and of later ones."""
    import numpy as np

    from optimum_neuron.core import PromptPiece

    if warm_up:
        runner.warm_up()
    prompt = np.arange(1, args.prompt_length + 1, dtype=np.int32)
    times = []
    for _ in range(args.rounds + 1):
        runner.reset_slots()
        for slot in range(args.slots):
            start = time.perf_counter()
            runner.run_step([PromptPiece(slot, prompt)])
            times.append(1e3 * (time.perf_counter() - start))
    first, later = times[1 : args.slots], times[args.slots :]
    return {"warm_up": warm_up, "first_ms": statistics.median(first), "later_ms": statistics.median(later)}


def tables(report: Report) -> Iterator[Table]:
    """First and later requests."""
    title = f"A prompt of {report['options']['prompt_length']} tokens in each of {report['options']['slots']} slots"
    table = Table(title, ("",), ("first, ms", "later, ms", "first / later"))
    for each in report["results"]:
        ratio = each["first_ms"] / each["later_ms"]
        name = "after a warm-up" if each["warm_up"] else "without warm-up"
        table.add_row(name, digits(each["first_ms"]), digits(each["later_ms"]), f"{ratio:.2f}")
    yield table


ABOUT = """The first request of a slot, compared with later ones in the same slot, with and without a warm-up of the runner. \
[How it is measured](../benchmark/README.md#generate)."""
SECTION = Section("First use of a slot", ABOUT, tables)


if __name__ == "__main__":
    sys.exit(main())
