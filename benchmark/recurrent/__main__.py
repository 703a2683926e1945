# SPDX-License-Identifier: Apache-2.0
"""Measures models with recurrences: this runtime against transformers, in one process, in turn, on the same prompts and type.

A layer with a recurrence keeps a state per row in place of keys and values: a matrix per head, in float32, and the last
inputs of a short convolution. A prompt's tokens pass through it one after another, which transformers does in blocks of
products; a decode step reads and writes all of it, beside the weights. So prefill and decode are measured apart, and of this
runtime's own steps what recurrences and convolutions take is told: the state's share, from a profile of a plan's steps.

Models are of random weights, in the shapes of published ones, made on the spot.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from optimum_neuron.cli import add_option, reported_errors

from ..machine import IDLE_LIMIT, describe_machine, warn_if_busy
from ..options import add_file_options, artifacts_folder, at_least, make_parser, positive
from ..output import publish, warn


if TYPE_CHECKING:
    from .report import Report, ShapeCase

NAMES, DTYPES = ("qwen3.5", "nemotron-h"), ("bfloat16", "float32")
EXAMPLES = """
shapes:
  qwen3.5     Qwen3.5-0.8B's text model, 752 million weights: 18 of 24 layers are gated delta nets, whose state is 19 MB a row
  nemotron-h  Nemotron-H-8B's, a quarter as wide and half as deep, 507 million: 12 of 26 layers are Mamba-2, whose state is 13 MB

how to read it:
  ratio        this runtime over transformers' generate(), by medians of one run: above 1, this runtime is faster
  at most      how many times as fast a prefill can be on this machine: its products with weights at the measured rate of
               products, and nothing else
  recurrence   of the time of a step's operators: the walk over its tokens, with the states read and written
  convolution  the same of the short convolutions before it
  state        both together

examples:
  python -m benchmark.recurrent --artifacts build/artifacts --json build/benchmark/recurrent.json
  python -m benchmark.recurrent --shapes qwen3.5 --dtypes bfloat16 --rows 1 --prompt-lengths 512
  python -m benchmark.recurrent --quick        # does it run?

Tables and, as the last line, one JSON object go to stdout; progress and warnings to stderr. Of more rows than one, only prompts of
the shortest length are measured. The exit code is 1 where the greedy tokens of float32 runs differ. Leave the machine alone
meanwhile.
"""


def parse_arguments() -> Namespace:
    """The options; needs no torch, so that --help is quick."""
    parser = make_parser("recurrent", __doc__, EXAMPLES)
    what = parser.add_argument_group("what to measure")
    add_option(what, "--shapes", nargs="+", choices=NAMES, default=list(NAMES), help="of the models")
    add_option(what, "--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="of weights and KV cache")
    quick_help = (
        "the first layers of each shape, a small vocabulary, bfloat16, one round of few tokens: takes a minute"
    )
    add_option(what, "--quick", action="store_true", help=quick_help)
    size = parser.add_argument_group("sizes")
    add_option(size, "--rows", type=positive, nargs="+", metavar="ROWS", default=[1, 8], help="prompts per call")
    lengths_help = "of each prompt"
    add_option(
        size, "--prompt-lengths", type=positive, nargs="+", metavar="TOKENS", default=[128, 512], help=lengths_help
    )
    # The first new token comes from prefill.
    add_option(size, "--new-tokens", type=at_least(2), metavar="TOKENS", default=24, help="generated per row")
    add_option(size, "--rounds", type=positive, metavar="ROUNDS", default=3, help="measured calls per system, in turn")
    add_option(size, "--seed", type=int, metavar="SEED", default=0, help="of weights and prompts")
    add_file_options(parser)
    args = parser.parse_args()
    if args.quick:
        args.dtypes, args.prompt_lengths, args.new_tokens, args.rounds = ["bfloat16"], [128], 4, 1
    args.rows, args.prompt_lengths = sorted(set(args.rows)), sorted(set(args.prompt_lengths))
    return args


def main() -> int:
    """Runs the benchmark; returns the exit code."""
    args = parse_arguments()
    with reported_errors():
        from .report import SECTION

        warn_if_busy()
        with artifacts_folder(args.artifacts) as folder:
            report = run(args, folder)
        SECTION.show(report.to_dict())
        equal = warn_of_results(report)
        publish(report.to_dict(), args.json)
    return 0 if equal else 1


def run(args: Namespace, folder: Path) -> Report:
    """Shape by shape and type by type: the checkpoint and its exports, then all cases in turn."""
    from optimum_neuron import progress

    from ..limits import measure_limits
    from .report import Report
    from .shapes import SHAPES, checkpoint

    with progress.stage("Measuring the limits of the machine"):
        limits = measure_limits()
    cases: list[ShapeCase] = []
    for shape in args.shapes:
        with progress.stage(f"Making {shape} of random weights"):
            model = checkpoint(shape, folder, quick=args.quick, seed=args.seed)
        for dtype in args.dtypes:
            cases += measure_shape(shape, model, dtype, args, folder)
    about = {shape: SHAPES[shape].about for shape in args.shapes}
    limits = limits.best(measure_limits())
    return Report(about, args.quick, args.new_tokens, args.rounds, describe_machine(), limits, cases)


def measure_shape(shape: str, model: Path, dtype: str, args: Namespace, folder: Path) -> list[ShapeCase]:
    """All cases of one model and type, over one copy of the peer."""
    from optimum_neuron import progress

    from ..measure import PromptSource, measure_case
    from ..model import export
    from ..systems import artifact_config, load_ours, load_peers
    from .parts import calls_needed, profile_call
    from .report import ShapeCase
    from .sizes import prompt_operations, state_bytes, weights_bytes

    longest = args.prompt_lengths[-1] + args.new_tokens
    exports = {}
    with progress.stage(f"Exporting {shape} in {dtype}", len(args.rows)) as advance:
        for rows in args.rows:
            exports[rows] = export(str(model), artifact_config(dtype, "cpu", rows, longest), folder)
            advance(f"{rows} rows")
    peers = load_peers(str(model), dtype, ["eager"])
    sizes = [(rows, length) for rows in args.rows for length in args.prompt_lengths[: None if rows == 1 else 1]]
    cases = []
    with progress.stage(f"Measuring {shape} in {dtype}", len(sizes)) as advance:
        for rows, length in sizes:
            ours = load_ours(exports[rows].path)
            artifact = ours.model.artifact
            prompts = PromptSource(artifact.model.vocab_size, args.seed)
            case = measure_case([ours, *peers], length, rows, args.new_tokens, args.rounds, prompts)
            del ours
            parts = profile_call(exports[rows].path, [prompts.draw(rows, length) for _ in range(calls_needed())])
            operations = prompt_operations(artifact, rows, length)
            cases.append(
                ShapeCase(shape, dtype, case, state_bytes(artifact), weights_bytes(artifact), parts, operations)
            )
            advance(f"{rows} x {length:,} tokens")
    return cases


def warn_of_results(report: Report) -> bool:
    """Warns of what makes numbers doubtful; returns whether all greedy tokens of float32 are equal."""
    equal = True
    for each in report.cases:
        case = each.case
        where = f"{each.shape}, {each.dtype}, {case.batch_size} x {case.prompt_length:,} tokens"
        if case.other_cores is not None and case.other_cores > IDLE_LIMIT:
            warn(
                f"{where}: other processes kept {case.other_cores:.1f} cores busy meanwhile; repeat it on an idle machine"
            )
        for name, agreement in case.agreement.items():
            if each.dtype == "float32" and agreement.equal_tokens < agreement.tokens:
                equal = False
                differing = agreement.tokens - agreement.equal_tokens
                warn(f"{where}: {differing} of {agreement.tokens} greedy tokens differ from {name}")
    return equal


if __name__ == "__main__":
    sys.exit(main())
