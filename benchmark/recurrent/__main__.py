# SPDX-License-Identifier: Apache-2.0
"""Measures models with recurrences: this runtime against transformers, in one process, in turn, on the same prompts and type.

A layer with a recurrence keeps a state per row in place of keys and values: a matrix per head, in float32, and the last
inputs of a short convolution. A prompt's tokens pass through it one after another, which transformers does in blocks of
products; a decode step reads and writes all of it. A profile of this runtime's own steps gives the state's share.

Models are of random weights, in the shapes of published ones, made on the spot.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

from optimum_neuron.cli import add_option, reported_errors

from ..machine import IDLE_LIMIT, describe_machine, measure_limits, warn_if_busy
from ..options import add_file_options, artifacts_folder, make_parser, positive
from ..output import warn
from .results import SECTION, SHAPES


DTYPES = ("bfloat16", "float32")
NEW_TOKENS = 24
EXAMPLES = f"""
shapes:
{chr(10).join(f"  {name:12}{about}" for name, about in SHAPES.items())}

examples:
  python -m benchmark.recurrent --artifacts build/artifacts --json build/benchmark/recurrent.json
  python -m benchmark.recurrent --shapes qwen3.5 --dtypes bfloat16 --rows 1 --prompt-lengths 512
  python -m benchmark.recurrent --quick        # does it run?

Of more rows than one, only prompts of the shortest length are measured. The exit code is 1 where the greedy tokens of float32 runs differ.
"""


def parse_arguments() -> Namespace:
    """Return the options; needs no torch, so that --help is quick."""
    parser = make_parser("recurrent", __doc__, EXAMPLES)
    what = parser.add_argument_group("what to measure")
    several: dict[str, Any] = {"nargs": "+"}
    add_option(what, "--shapes", **several, choices=list(SHAPES), default=list(SHAPES), help="of the models")
    add_option(what, "--dtypes", **several, choices=DTYPES, default=list(DTYPES), help="of weights and KV cache")
    quick_help = "the first layers of each shape, a small vocabulary, one round of few tokens: takes a minute"
    add_option(what, "--quick", action="store_true", help=quick_help)
    several["type"] = positive
    add_option(what, "--rows", **several, metavar="ROWS", default=[1, 8], help="prompts per call")
    add_option(what, "--prompt-lengths", **several, metavar="TOKENS", default=[128, 512], help="of each prompt")
    add_option(what, "--rounds", type=positive, metavar="ROUNDS", default=3, help="measured calls per system, in turn")
    add_file_options(parser)
    args = parser.parse_args()
    if args.quick:
        args.dtypes, args.prompt_lengths, args.rounds = ["bfloat16"], [128], 1
    args.rows, args.prompt_lengths = sorted(set(args.rows)), sorted(set(args.prompt_lengths))
    return args


def main() -> int:
    """Run the benchmark; return the exit code."""
    args = parse_arguments()
    with reported_errors():
        warn_if_busy()
        with artifacts_folder(args.artifacts) as folder:
            report = run(args, folder)
        equal = warn_of_results(report["cases"])
        SECTION.finish(report, args.json)
    return 0 if equal else 1


def run(args: Namespace, folder: Path) -> dict[str, Any]:
    """Measure shape by shape and type by type; return the report."""
    from optimum_neuron import progress

    from .measure import add_bounds, measure_shape
    from .shapes import checkpoint

    with progress.stage("Measuring the limits of the machine"):
        limits = measure_limits()
    cases: list[dict[str, Any]] = []
    for shape in args.shapes:
        with progress.stage(f"Making {shape} of random weights"):
            model = checkpoint(shape, folder, quick=args.quick)
        for dtype in args.dtypes:
            cases += measure_shape(shape, model, dtype, args, NEW_TOKENS, folder)
    limits = limits.best(measure_limits())
    add_bounds(cases, limits)
    return {
        "benchmark": "recurrent",
        "shapes": {shape: SHAPES[shape] for shape in args.shapes},
        "quick": args.quick,
        "new_tokens": NEW_TOKENS,
        "rounds": args.rounds,
        "machine": describe_machine(),
        "limits": asdict(limits),
        "cases": cases,
    }


def warn_of_results(cases: list[dict[str, Any]]) -> bool:
    """Warn of what makes numbers doubtful; return whether all greedy tokens of float32 are equal."""
    equal = True
    for each in cases:
        case = each["case"]
        where = f"{each['shape']}, {each['dtype']}, {case['batch_size']} x {case['prompt_length']:,} tokens"
        if (case["other_cores"] or 0) > IDLE_LIMIT:
            warn(f"{where}: other processes kept {case['other_cores']:.1f} cores busy; repeat it on an idle machine")
        for name, found in case["agreement"].items():
            if each["dtype"] == "float32" and found["equal_tokens"] < found["tokens"]:
                equal = False
                warn(f"{where}: {found['equal_tokens']} of {found['tokens']} greedy tokens are those of {name}")
    return equal


if __name__ == "__main__":
    sys.exit(main())
