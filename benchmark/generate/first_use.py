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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from optimum_neuron.cli import add_option, reported_errors

from ..machine import describe_machine, warn_if_busy
from ..options import add_file_options, add_model_options, artifacts_folder, make_parser, positive
from ..output import Table, digits, publish
from ..section import Report, Section


if TYPE_CHECKING:
    from optimum_neuron.runtime.runner import GraphRunner

EXAMPLES = """
examples:
  python -m benchmark.generate.first_use --artifacts build/artifacts --json build/benchmark/first_use.json
  python -m benchmark.generate.first_use --slots 2 --prompt-length 8 --rounds 1      # does it run?
"""
SEQUENCE_LENGTH = 2048


@dataclass(frozen=True)
class Result:
    """Medians over all slots, in ms.

    Attributes:
        first_ms: of each slot's first prompt, without that of the first slot, which also finds the graph cold.
        later_ms: of its later ones.
    """

    warm_up: bool
    first_ms: float
    later_ms: float


def parse_arguments() -> Namespace:
    """Return the options; needs no torch, so that --help is quick."""
    parser = make_parser("generate.first_use", __doc__, EXAMPLES)
    what = parser.add_argument_group("what to measure")
    add_model_options(what)
    add_option(what, "--slots", type=positive, metavar="SLOTS", default=16, help="of the artifact, at least 2")
    add_option(what, "--prompt-length", type=positive, metavar="TOKENS", default=75, help="of each request")
    add_option(what, "--rounds", type=positive, metavar="ROUNDS", default=5, help="of later requests in all slots")
    add_file_options(parser)
    return parser.parse_args()


def main() -> int:
    """Run the benchmark; return the exit code."""
    args = parse_arguments()
    with reported_errors():
        if args.slots < 2:
            raise ValueError(
                f"--slots {args.slots} leaves no slot to measure, as the first one is not counted; give 2 or more"
            )
        from ..model import default_model, export
        from ..systems import artifact_config, load_ours

        warn_if_busy()
        config = artifact_config(args.dtype, "cpu", args.slots, SEQUENCE_LENGTH)
        with artifacts_folder(args.artifacts) as folder:
            path = export(args.model or default_model(), config, folder).path
            results = [_measure(load_ours(path).model.runner, args, warm_up=each) for each in (False, True)]
        report = {
            "benchmark": "first_use",
            "options": {name: value for name, value in vars(args).items() if not isinstance(value, Path)},
            "machine": describe_machine(),
            "results": [asdict(each) for each in results],
        }
        SECTION.show(report)
        publish(report, args.json)
    return 0


def _measure(runner: GraphRunner, args: Namespace, *, warm_up: bool) -> Result:
    import numpy as np

    from optimum_neuron.runtime.step_tensors import Chunk

    if warm_up:
        runner.warm_up()
    prompt = np.arange(1, args.prompt_length + 1, dtype=np.int32)
    times = []
    for _ in range(args.rounds + 1):
        runner.reset_all()
        for slot in range(args.slots):
            start = time.perf_counter()
            runner.prefill([Chunk(slot, prompt)])
            times.append(1e3 * (time.perf_counter() - start))
    return Result(warm_up, statistics.median(times[1 : args.slots]), statistics.median(times[args.slots :]))


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
