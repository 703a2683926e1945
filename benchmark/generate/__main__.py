# SPDX-License-Identifier: Apache-2.0
"""Measures generate(): this runtime against transformers, in one process, in turn, on the same prompts and dtype.

Two phases are measured apart, because different things limit them. Prefill processes a whole prompt at once: it is
bound by arithmetic, and its speed is prompt tokens per second, or the time to the first token (TTFT). Decode processes
one token per row and step, and reads every weight to do so: it is bound by memory, a step of 8 rows takes little longer
than one of a single row, and its speed is milliseconds per step, or new tokens per second of a row and of all rows.

Both are taken from calls of generate() through a streamer, so that everything a user waits for is in them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from optimum_neuron.cli import add_option, reported_errors

from ..machine import IDLE_LIMIT, describe_machine, warn_if_busy
from ..options import (
    add_file_options,
    add_model_options,
    artifacts_folder,
    at_least,
    make_parser,
    positive,
)
from ..output import publish, warn


if TYPE_CHECKING:
    from ..measure import Case
    from ..model import Export
    from .report import ArtifactReport, Report

ROOT = Path(__file__).resolve().parents[2]
PEERS = ("eager", "static")
EXAMPLES = """
peers:
  eager   transformers generate() with its defaults
  static  generate(cache_implementation="static") with torch.compile for decode steps, as on accelerators; on the CPU
          transformers compiles only when told by a private flag, which is set here, and checked by counting graphs

examples:
  python -m benchmark.generate --artifacts build/artifacts --json build/benchmark/generate.json
  python -m benchmark.generate --model HuggingFaceTB/SmolLM2-135M-Instruct --dtype float32 --peers eager
  python -m benchmark.generate --batch-sizes 1 --prompt-lengths 128 --new-tokens 4 --repeats 1    # does it run?

A table and, as the last line, one JSON object go to stdout; progress and warnings to stderr. The exit code is 1 where
the greedy tokens of float32 runs differ. Leave the machine alone meanwhile: a busy neighbour costs more than any change.
"""


def parse_arguments() -> Namespace:
    """The options; needs no torch, so that --help is quick."""
    parser = make_parser("generate", __doc__, EXAMPLES)
    what = parser.add_argument_group("what to measure")
    add_model_options(what)
    add_option(what, "--target", choices=("cpu", "eager"), default="cpu", help="where this runtime's graphs run")
    peers_help = f"transformers systems to compare with, of {', '.join(PEERS)}; none after the option: ours alone"
    add_option(what, "--peers", nargs="*", choices=PEERS, default=list(PEERS), help=peers_help)
    size = parser.add_argument_group("sizes")
    several = {"type": positive, "nargs": "+"}
    add_option(size, "--batch-sizes", **several, metavar="ROWS", default=[1, 4, 8], help="prompts per call")
    add_option(size, "--prompt-lengths", **several, metavar="TOKENS", default=[128, 512, 2048], help="of each prompt")
    # The first new token comes from prefill.
    new_help = "generated per row, no fewer and no more"
    add_option(size, "--new-tokens", type=at_least(2), metavar="TOKENS", default=32, help=new_help)
    repeats_help = "measured calls per system and case, in turn"
    add_option(size, "--repeats", type=positive, metavar="ROUNDS", default=5, help=repeats_help)
    add_option(size, "--seed", type=int, metavar="SEED", default=0, help="of the random prompts")
    add_file_options(parser)
    return parser.parse_args()


def main() -> int:
    """Runs the benchmark; returns the exit code."""
    args = parse_arguments()
    with reported_errors():
        from .report import print_tables

        warn_if_busy()
        with artifacts_folder(args.artifacts) as folder:
            report = run(args, folder)
        print_tables(report)
        equal = warn_of_results(report)
        publish(report.to_dict(), args.json)
    return 0 if equal or args.dtype != "float32" else 1


def run(args: Namespace, folder: Path) -> Report:
    """Batch size by batch size: export, load in a fresh process, then measure at every prompt length."""
    from optimum_neuron import progress

    from ..measure import PromptSource, measure_case
    from ..model import default_model, export
    from ..systems import artifact_config, load_ours, load_peers
    from .report import Report

    model = args.model or default_model()
    longest = max(args.prompt_lengths)
    configs = [artifact_config(args.dtype, args.target, rows, longest + args.new_tokens) for rows in args.batch_sizes]
    with progress.stage("Exporting", len(configs)) as advance:
        exports = []
        for config in configs:
            exports.append(export(model, config, folder))
            advance(f"batch size {config.batch_size}")
    with progress.stage("Loading in fresh processes", len(exports)) as advance:
        artifacts = []
        for exported in exports:
            artifacts.append(probe(exported, longest, args.new_tokens))
            advance(exported.path.name)
    peers = load_peers(model, args.dtype, args.peers)
    cases: list[Case] = []
    prompts = None
    with progress.stage("Measuring", len(exports) * len(args.prompt_lengths)) as advance:
        for exported, rows in zip(exports, args.batch_sizes, strict=True):
            ours = load_ours(exported.path)
            prompts = prompts or PromptSource(ours.model.artifact.model.vocab_size, args.seed)
            for length in args.prompt_lengths:
                cases.append(measure_case([ours, *peers], length, rows, args.new_tokens, args.repeats, prompts))
                advance(f"{rows} x {length:,} tokens")
            del ours
    name = Path(model).name if Path(model).exists() else model
    return Report(name, args.dtype, args.target, args.new_tokens, args.repeats, describe_machine(), artifacts, cases)


def probe(exported: Export, prompt_length: int, new_tokens: int) -> ArtifactReport:
    """Loads an artifact in a fresh process and lets it generate once from the longest prompts."""
    from optimum_neuron.artifact.artifact import Artifact

    from .report import ArtifactReport

    config = Artifact.open(exported.path).config
    command = [sys.executable, "-m", "benchmark.generate.probe", str(exported.path.resolve())]
    command += [str(prompt_length), str(new_tokens)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"loading {exported.path.name} in a fresh process failed: {done.stderr.strip()[-1500:]}")
    numbers = json.loads(done.stdout.splitlines()[-1])
    return ArtifactReport(
        config.batch_size,
        config.sequence_length,
        config.chunk_sizes,
        exported.seconds,
        exported.compile_cache,
        numbers,
    )


def warn_of_results(report: Report) -> bool:
    """Warns of what makes numbers doubtful; returns whether all greedy tokens are equal."""
    equal = True
    for case in report.cases:
        where = f"{case.batch_size} x {case.prompt_length:,} tokens"
        if case.other_cores is not None and case.other_cores > IDLE_LIMIT:
            warn(
                f"{where}: other processes kept {case.other_cores:.1f} cores busy meanwhile; repeat it on an idle machine"
            )
        for name, speed in case.speeds.items():
            if name == "static" and not speed.compiled_graphs[0]:
                warn(f"{where}: static was not compiled: it is generate() with a static cache only")
            if speed.compiled_graphs[1]:
                warn(
                    f"{where}: {name} compiled {speed.compiled_graphs[1]} graphs while it was measured; see its maximum"
                )
        for name, agreement in case.agreement.items():
            if agreement.equal_tokens < agreement.tokens:
                equal = False
                if report.dtype == "float32":
                    warn(
                        f"{where}: {agreement.tokens - agreement.equal_tokens} of {agreement.tokens} greedy tokens differ from {name}"
                    )
    return equal


if __name__ == "__main__":
    sys.exit(main())
