# SPDX-License-Identifier: Apache-2.0
"""Weights of codes against plain ones, with the defaults of an export: decode steps of few rows, and prefill.

Each instruction set has a process of its own, in which artifacts of one model take turns. A ratio is the median over rounds of the plain
weights' time over the format's: below 1 the format is slower, and its row is lost.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimum_neuron.cli import add_option, reported_errors
from optimum_neuron.runtime.step_tensors import DecodeRows

from ..machine import describe_machine, warn_if_busy
from ..options import add_file_options, add_model_options, artifacts_folder, make_parser, positive
from ..output import Table
from ..section import Compared, Report, Section


if TYPE_CHECKING:
    from optimum_neuron.kernels.host.instruction_sets import InstructionSet
    from optimum_neuron.runtime.runner import GraphRunner

    from ..systems import System

EXAMPLES = """
examples:
  python -m benchmark.generate.formats --artifacts build/artifacts --json build/benchmark/formats.json
  python -m benchmark.generate.formats --instruction-sets avx2 --rows 1 2 4 8 16 32
  python -m benchmark.generate.formats --formats int8 --rows 1 --rounds 1      # does it run?
"""
PLAIN, PREFILL = "plain", "prefill"
# Checkpoint: the codes of a .gguf file or of a quantized checkpoint as they are.
FORMATS = ("int8", "int4", "checkpoint")
# Tokens in the cache of each row, and of a prompt; decode steps of a turn.
CONTEXT, PROMPT, STEPS = 256, 512, 16
# Milliseconds round by round: by a format and its activations, then by the rows of a step or PREFILL.
Times = dict[tuple[str, str | None], dict[str, list[float]]]


def parse_arguments() -> Namespace:
    """Return the options; needs no torch, so that --help is quick."""
    parser = make_parser("generate.formats", __doc__, EXAMPLES)
    what = parser.add_argument_group("what to measure")
    add_model_options(what)
    formats_help = "of weights, against plain ones; checkpoint keeps the codes of a file that has some"
    add_option(what, "--formats", nargs="+", choices=FORMATS, default=list(FORMATS), help=formats_help)
    sets_help = (
        "to compile kernels for (default: OPTIMUM_NEURON_CPU's, or all of this CPU that compute with long vectors)"
    )
    add_option(what, "--instruction-sets", nargs="+", metavar="SET", default=None, help=sets_help)
    rows_help = "live rows of a decode step"
    add_option(what, "--rows", nargs="+", type=positive, metavar="ROWS", default=[1, 8], help=rows_help)
    add_option(what, "--rounds", type=positive, metavar="ROUNDS", default=9, help="of all formats in turn")
    add_file_options(parser)
    args = parser.parse_args()
    args.rows = sorted(set(args.rows))
    return args


def main() -> int:
    """Run the benchmark; return the exit code."""
    args = parse_arguments()
    with reported_errors():
        from optimum_neuron.kernels.host.instruction_sets import CPU_VARIABLE

        warn_if_busy()
        results: list[dict[str, Any]] = []
        with artifacts_folder(args.artifacts) as folder:
            for each in chosen_sets(args.instruction_sets):
                if os.environ.get(CPU_VARIABLE) == each.name:
                    # Which activations an export rounds depends on the instruction set.
                    results += summarize(each.name, measure(args, folder / each.name))
                else:
                    results += measure_apart(each, folder)
        report = {"benchmark": "formats", "dtype": args.dtype, "machine": describe_machine(), "results": results}
        SECTION.finish(report, args.json)
    return 0


def chosen_sets(names: Sequence[str] | None) -> list[InstructionSet]:
    """Return the instruction sets to measure; raise ValueError where this machine lacks one."""
    from optimum_neuron.kernels.host.instruction_sets import (
        CPU_VARIABLE,
        choose_instruction_set,
        list_instruction_sets,
    )

    own = {each.name: each for each in list_instruction_sets()}
    if names is None:
        held = bool(os.environ.get(CPU_VARIABLE))
        return [choose_instruction_set()] if held else [each for each in own.values() if each.needs]
    for name in names:
        if name not in own:
            raise ValueError(f"--instruction-sets {name} is none of this machine's; choose of {', '.join(own)}")
    return [own[name] for name in dict.fromkeys(names)]


def measure_apart(chosen: InstructionSet, folder: Path) -> list[dict[str, Any]]:
    """Measure in a process that is held to an instruction set; raise RuntimeError where that fails."""
    from optimum_neuron.kernels.host.instruction_sets import CPU_VARIABLE

    options = [*sys.argv[1:], "--instruction-sets", chosen.name, "--artifacts", str(folder)]
    environment = os.environ | {CPU_VARIABLE: chosen.name}
    command = [sys.executable, "-m", "benchmark.generate.formats", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"measuring with {CPU_VARIABLE}={chosen.name} failed; stderr says why")
    results: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])["results"]
    return results


def measure(args: Namespace, folder: Path) -> Times:
    """Return the times of all rounds but a first one."""
    from ..systems import PromptSource, timed_call

    systems = load_formats(args, folder)
    prompt = PromptSource(systems[PLAIN].model.artifact.model.vocab_size, 0).draw(1, PROMPT)
    times: Times = {}
    for number in range(args.rounds + 1):
        for name, system in systems.items():
            runner = system.model.runner
            spent = {str(rows): decode_ms(runner, rows) for rows in args.rows}
            spent[PREFILL] = 1e3 * timed_call(system, prompt, 1).first_token
            for case, ms in spent.items():
                own = times.setdefault((name, runner.config.activations), {}).setdefault(case, [])
                own.extend([ms] if number else [])
    return times


def load_formats(args: Namespace, folder: Path) -> dict[str, System]:
    """Export the model in each format, and load it."""
    from ..model import default_model, export, generate_config
    from ..systems import load_ours

    config = generate_config(args.dtype, args.rows[-1], max(PROMPT + 1, CONTEXT + STEPS))
    model, systems = args.model or default_model(), {}
    for name in (PLAIN, *args.formats):
        own = config if name == PLAIN else replace(config, quantization=name)
        systems[name] = load_ours(export(model, own, folder).path)
    return systems


def decode_ms(runner: GraphRunner, rows: int) -> float:
    """Return milliseconds of a decode step of live rows, the mean of several that follow each other."""
    import numpy as np

    from optimum_neuron.step.spec import GREEDY

    slots = runner.config.batch_size
    active = np.arange(slots) < rows
    token_ids, uniforms = np.ones(slots, dtype=np.int32), np.zeros(slots, dtype=np.float32)
    params = np.tile(np.array(GREEDY, dtype=np.float32), (slots, 1))
    runner.reset_slots()
    runner.lengths[active] = CONTEXT
    start = time.perf_counter()
    for _ in range(STEPS):
        runner.run_step((), DecodeRows(token_ids, active, params, uniforms))
    return 1e3 * (time.perf_counter() - start) / STEPS


def summarize(instruction_set: str, times: Times) -> list[dict[str, Any]]:
    """Return a record for each format and case; a ratio compares times of one round."""
    plain = next(cases for (name, _), cases in times.items() if name == PLAIN)
    results = []
    for (name, activations), cases in times.items():
        for case, ms in cases.items():
            ratio = statistics.median(other / own for other, own in zip(plain[case], ms, strict=True))
            record = {"instruction_set": instruction_set, "format": name, "activations": activations, "case": case}
            results.append({**record, "ms": statistics.median(ms), "times_plain": ratio, "lost": ratio < 1})
    return results


def step_of(record: dict[str, Any]) -> str:
    """Return the name of a case."""
    return record["case"] if record["case"] == PREFILL else f"{record['case']} rows"


def tables(report: Report) -> Iterator[Table]:
    """A table for each instruction set."""
    for name in dict.fromkeys(each["instruction_set"] for each in report["results"]):
        table = Table(f"Compiled for {name}", ("weights", "activations", "step"), ("ms", "times as fast as plain"))
        for each in report["results"]:
            if each["instruction_set"] == name:
                numbers = f"{each['ms']:.2f}", f"{each['times_plain']:.2f}"
                table.add_row(each["format"], each["activations"] or "", step_of(each), *numbers)
        yield table


def compared(report: Report) -> Iterator[Compared]:
    """Each format with plain weights, by the median of rounds."""
    for each in report["results"]:
        if each["format"] != PLAIN:
            what = f"{each['format']} {step_of(each)}"
            plain = {"plain weights": each["ms"] * each["times_plain"]}
            yield Compared(each["instruction_set"], what, each["ms"], plain, more=False)


ABOUT = """Weights of codes and plain ones, with the defaults of an export, each instruction set in a process that plays a CPU that has no more. \
[How it is measured](../benchmark/README.md#generate)."""
SECTION = Section("Formats of weights", ABOUT, tables, compared)


if __name__ == "__main__":
    sys.exit(main())
