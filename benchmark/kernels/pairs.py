# SPDX-License-Identifier: Apache-2.0
"""How kernels are compared: theirs and ours in turn, pair by pair, in one run. Knows no kernel."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from optimum_neuron.cli import add_option, reported_errors
from optimum_neuron.kernels.build import library
from optimum_neuron.kernels.build.host import CPU_VARIABLE, InstructionSet, instruction_set, instruction_sets

from ..machine import describe_machine, warn_if_busy
from ..options import add_result_options, make_parser, positive
from ..output import Table, console, publish, warn


Result = dict[str, Any]

# Threads of a side that has just computed look out for more work for about as long, on a core that the other side needs.
_SETTLING_SECONDS = 0.003


def compare(theirs: Callable[[int], Any], ours: Callable[[int], Any], pairs: int) -> tuple[float, float]:
    """Median milliseconds of ours, and the median of their time over ours, pair by pair.

    Args:
        theirs, ours: get the number of the call, which is another for each.
    """
    turns = itertools.count()
    times, ratios = [], []
    for _ in range(pairs):
        other = _seconds(theirs, turns)
        times.append(_seconds(ours, turns))
        ratios.append(other / times[-1])
    return 1e3 * statistics.median(times), statistics.median(ratios)


def _seconds(call: Callable[[int], Any], turns: Iterator[int]) -> float:
    """Of one call, after calls that do not count."""
    begin = time.perf_counter()
    while True:
        start = time.perf_counter()
        call(next(turns))
        if start - begin >= _SETTLING_SECONDS:
            return time.perf_counter() - start


@torch.no_grad()
def run(
    name: str,
    description: str | None,
    table: Table,
    measure: Callable[[torch.dtype, int], list[Result]],
    cells: Callable[[Result], Sequence[str]],
    dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float32),
) -> int:
    """Runs a benchmark of kernels to its end; returns the exit code.

    Args:
        measure: gets a type and the number of pairs.
        cells: a result as a row of the table.
    """
    examples = f"examples:\n  python -m benchmark.kernels.{name} --pairs 2      # does it run?"
    parser = make_parser(f"kernels.{name}", description, examples)
    add_option(
        parser, "--pairs", type=positive, metavar="PAIRS", default=25, help="timed calls of each; medians count"
    )
    add_result_options(parser)
    args = parser.parse_args()
    with reported_errors():
        chosen = instruction_set()
        library.load()
        _warn_if_torch_has_more(chosen)
        warn_if_busy()
        table.title = f"{table.title}, compiled for {chosen.name}"
        results = [each for dtype in dtypes for each in measure(dtype, args.pairs)]
        for each in results:
            table.add_row(*cells(each))
        console().print(table)
        report = {"benchmark": name, "pairs": args.pairs, "machine": describe_machine(), "results": results}
        publish(report, args.json)
    return 0


def _warn_if_torch_has_more(chosen: InstructionSet) -> None:
    """Warns where our kernels are held to less than this CPU has, and torch's operators are not."""
    if chosen != instruction_sets()[0] and any(os.environ.get(name) != value for name, value in chosen.torch):
        settings = " ".join(f"{name}={value}" for name, value in chosen.torch)
        warn(f"torch's operators are not held to {CPU_VARIABLE}={chosen.name}; {settings} holds them too")
