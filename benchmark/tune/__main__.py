# SPDX-License-Identifier: Apache-2.0
"""Tunes a model for a trace on this CPU, then exports the best candidates and serves the trace by each, in real time.

What `optimum-cli neuron tune` predicted stands beside what was served: percentiles of the time to the first token and between two
tokens, and throughput. Ratios are served over predicted: above 1, the prediction was too good.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimum_neuron.cli import add_option, reported_errors

from ..machine import OtherProcesses, describe_machine, warn_if_busy
from ..options import (
    above_zero,
    add_file_options,
    add_model_options,
    artifacts_folder,
    at_least,
    make_parser,
    positive,
)
from ..output import publish
from .made_trace import made_trace
from .report import SECTION, Comparison


if TYPE_CHECKING:
    from optimum_neuron.tools.tune.tune import Report

EXAMPLES = """
examples:
  python -m benchmark.tune --artifacts build/artifacts --json build/benchmark/tune.json
  python -m benchmark.tune --trace trace.csv --slo ttft=2s,itl=100ms --served 3
  python -m benchmark.tune --requests 4 --search batch=2 chunk=64 policy=mixed --served 1    # does it run?

Tables and, as the last line, one JSON object go to stdout; progress and warnings to stderr.
"""


def parse_arguments(arguments: list[str] | None = None) -> Namespace:
    """The options; needs no torch, so that --help is quick."""
    parser = make_parser("tune", __doc__, EXAMPLES)
    what = parser.add_argument_group("what to tune")
    add_model_options(what)
    add_option(what, "--slo", metavar="LIMITS", default="ttft=2s,itl=150ms", help="as in optimum-cli neuron tune")
    search: dict[str, Any] = {"nargs": "+", "metavar": "AXIS=VALUES", "default": ["batch=4,8", "chunk=32,64,128"]}
    add_option(what, "--search", **search, help="as in optimum-cli neuron tune")
    add_option(what, "--served", type=positive, metavar="COUNT", default=2, help="best candidates that are served")
    load = parser.add_argument_group("load")
    add_option(
        load, "--trace", type=Path, metavar="FILE", default=None, help="a trace (default: one is made of what follows)"
    )
    add_option(load, "--requests", type=positive, metavar="COUNT", default=40, help="that are sent")
    add_option(load, "--rate", type=above_zero, metavar="PER_SECOND", default=1.2, help="of them, at random times")
    add_option(load, "--prompt", type=positive, metavar="TOKENS", default=150, help="the median of prompts")
    add_option(load, "--new-tokens", type=positive, metavar="TOKENS", default=40, help="the median of answers")
    add_option(load, "--seed", type=at_least(0), metavar="SEED", default=0, help="of lengths and arrivals")
    add_file_options(parser)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code."""
    args = parse_arguments(arguments)
    with reported_errors():
        from optimum_neuron.tools.tune.slo import Slo
        from optimum_neuron.tools.tune.trace_formats import read_trace

        slo = Slo.parse(args.slo)
        trace = made_trace(args) if args.trace is None else read_trace(args.trace).first(args.requests)

        from optimum_neuron.tools.tune.tune import tune_model

        from ..model import default_model

        warn_if_busy()
        others = OtherProcesses()
        model = args.model or default_model()
        report = tune_model(model, trace, slo, target="cpu", axes=args.search, options={"dtype": args.dtype})
        comparisons = _serve(args, model, report)
        found = {
            "benchmark": "tune",
            "model": Path(model).name,
            "options": {name: value for name, value in vars(args).items() if not isinstance(value, Path)},
            "machine": describe_machine(),
            "other_cores": others.cores(),
            "about": list(report.about),
            "served": [comparison.to_dict() for comparison in comparisons],
        }
        SECTION.show(found)
        publish(found, args.json)
    return 0


def _serve(args: Namespace, model: str, report: Report) -> list[Comparison]:
    from ..model import export
    from .serve import serve

    found = []
    with artifacts_folder(args.artifacts) as folder:
        for result in report.search.results[: args.served]:
            artifact = export(model, result.candidate.config, folder).path
            found.append(Comparison(str(result.candidate), result.figures, serve(artifact, report.trace)))
    return found


if __name__ == "__main__":
    sys.exit(main())
