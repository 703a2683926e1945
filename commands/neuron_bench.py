# SPDX-License-Identifier: Apache-2.0
"""optimum-cli neuron bench: the speed of an artifact on this machine."""

from __future__ import annotations

from argparse import ArgumentParser

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo
from optimum.commands.register.neuron_options import (
    add_file,
    add_named_model,
    add_number,
    add_rank_options,
    run_options,
)

from optimum_neuron.cli import console, explain, refuse_existing, reported_errors, write_json


DESCRIPTION = """\
Measure the speed of an artifact on this machine, or of a checkpoint, which is exported into the cache on first use. The engine
that serves it runs single prompts of some lengths (tokens per second, time to the first token), and rows that decode together (time
per step, tokens per second, time between two tokens of a row). A run that is not measured comes first. The table has the median, the
least and the most of all repetitions. Prompts are random tokens, and nothing is reused.

padding      the share of a prompt's graphs that holds no token of it
idle rows    the share of the decode graph's rows that holds no request

--json writes all of it, in the form that docs/bench.md explains. It replaces no file."""

EXAMPLES = """\
examples:
  optimum-cli neuron bench smollm2/
  optimum-cli neuron bench smollm2/ --prompt-lengths 128 1024 --batch 1 4 --new-tokens 64 --repeat 5
  optimum-cli neuron bench smollm2/ --json smollm2.json
"""
NUMBERS = (
    ("--prompt-lengths", "TOKENS", "lengths of prompts (default: of 128, 512 and 2048 those that fit)"),
    ("--batch", "ROWS", "how many rows decode together (default: 1, 2, 4 and so on to all rows)"),
    ("--context-length", "TOKENS", "tokens that each row has before it decodes (default: 128, or what fits)"),
)


class NeuronBenchCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo(name="bench", help="Measure an artifact's speed on this machine.")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        explain(parser, DESCRIPTION, EXAMPLES)
        add_named_model(parser)
        for flag, metavar, text in NUMBERS:
            add_number(parser, flag, metavar, text, nargs="+" if flag in ("--prompt-lengths", "--batch") else None)
        add_number(parser, "--new-tokens", "TOKENS", "new tokens of each row", default=32)
        text = "repetitions of each measurement (default: %(default)s)"
        parser.add_argument("--repeat", type=int, default=3, help=text)
        add_file(parser, "--json", "write everything to a new file")
        add_rank_options(parser)

    @reported_errors()
    def run(self) -> None:
        args = self.args
        from optimum_neuron.export.first_use import open_named

        # Before torch is imported: wrong files and folders are reported at once.
        refuse_existing("--json", args.json)
        artifact = open_named(args)

        from optimum_neuron.tools.bench.measure import make_plan
        from optimum_neuron.tools.bench.report import print_report, run_bench

        plan = make_plan(
            artifact.config, args.prompt_lengths, args.batch, args.context_length, args.new_tokens, args.repeat
        )
        report = run_bench(artifact, plan, **run_options(args))
        print_report(report, console())
        if args.json is not None:
            write_json(args.json, report.to_dict())
