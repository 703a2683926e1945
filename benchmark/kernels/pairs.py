# SPDX-License-Identifier: Apache-2.0
"""How kernels are compared: theirs and ours in turn, pair by pair, in one run. Knows no kernel."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from optimum_neuron.cli import add_option, reported_errors
from optimum_neuron.targets.cpu import kernels

from ..machine import describe_machine, warn_if_busy
from ..options import add_result_options, make_parser, positive
from ..output import console, publish


if TYPE_CHECKING:
    from rich.table import Table

Result = dict[str, Any]


def compare(theirs: Callable[[int], Any], ours: Callable[[int], Any], pairs: int) -> tuple[float, float]:
    """Median milliseconds of ours, and the median of their time over ours, pair by pair."""
    theirs(0), ours(0)
    times, ratios = [], []
    for turn in range(pairs):
        start = time.perf_counter()
        theirs(turn)
        middle = time.perf_counter()
        ours(turn)
        times.append(time.perf_counter() - middle)
        ratios.append((middle - start) / times[-1])
    return 1e3 * statistics.median(times), statistics.median(ratios)


@torch.no_grad()
def run(
    name: str,
    description: str | None,
    table: Table,
    measure: Callable[[torch.dtype, int], list[Result]],
    cells: Callable[[Result], tuple[str, ...]],
) -> int:
    """Runs a benchmark of kernels to its end, in bfloat16 and float32; returns the exit code.

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
        if not kernels.are_fast_here():
            raise RuntimeError("this CPU lacks AVX512-BF16, so the cpu target uses torch's operators here")
        warn_if_busy()
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "kernels.so"
            kernels.build(library)
            kernels.load(library, kernels.namespace())
        results = [each for dtype in (torch.bfloat16, torch.float32) for each in measure(dtype, args.pairs)]
        for each in results:
            table.add_row(*cells(each))
        console().print(table)
        report = {"benchmark": name, "pairs": args.pairs, "machine": describe_machine(), "results": results}
        publish(json.dumps(report), args.json)
    return 0
