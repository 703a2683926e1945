# SPDX-License-Identifier: Apache-2.0
"""Simulates an engine on AWS Neuron: which chunk size, batch size and policy serve N users, before anything is rented.

The scheduler is the one that serves; only the device is replaced, by a clock that advances by what each step costs. A
graph has fixed shapes, so a step costs what its graph costs. Those costs come from published times of one model on one
instance (see `Calibration`), or from times that you give.

Measured by others: the times that the costs are fitted to. Inferred: how they split into weights, rows and tokens, and
hence every chunk size, batch size and mixed step that nobody measured. Left out: the host (unless --host-ms), attention
that grows with the context (unless the calibration says how), copies of shared prefixes, the network, and whatever
replicas on one instance take from each other. Read differences between rows, not milliseconds.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import replace

from optimum_neuron.cli import reported_errors

from ..output import publish
from .options import parse_arguments
from .report import print_report
from .results import Objective, Report
from .step_costs import Calibration
from .sweep import check_calibration, run, workload_of


def main(arguments: list[str] | None = None) -> int:
    """Runs the sweep; returns the exit code."""
    args = parse_arguments(__doc__, arguments)
    with reported_errors():
        calibration = _calibration(args)
        rows = run(args, calibration)
        checks = check_calibration() if calibration == Calibration() else []
        objective = Objective(args.itl_p99_ms, args.ttft_p99_ms)
        report = Report(calibration, checks, workload_of(args, 1), rows, objective)
        print_report(report)
        publish(report.to_dict(), args.json)
    return 0


def _calibration(args: Namespace) -> Calibration:
    calibration = Calibration()
    if args.calibration:
        calibration = Calibration.from_file(args.calibration)
    elif args.decode_ms:
        calibration = Calibration.from_times(
            args.decode_ms, args.decode_rows, args.chunk_ms, args.chunk_tokens, source="--decode-ms and --chunk-ms"
        )
    return replace(calibration, launch_ms=calibration.launch_ms + args.host_ms)


if __name__ == "__main__":
    sys.exit(main())
