# SPDX-License-Identifier: Apache-2.0
"""optimum-cli neuron check: a proof of an artifact on the devices of this machine."""

from __future__ import annotations

from argparse import ArgumentParser
from contextlib import nullcontext
from typing import TYPE_CHECKING

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo
from optimum.commands.register.neuron_options import (
    add_artifact,
    add_file,
    add_number,
    add_profile_option,
    add_rank_options,
    print_profile,
)

from optimum_neuron.cli import console, explain, make_table, reported_errors, write_json


if TYPE_CHECKING:
    from optimum_neuron.tools.check.checks import CheckReport

DESCRIPTION = """\
Prove an artifact on the machine that it is for: does everything load there, and compute the right thing? It is the first
command for a new instance, driver or SDK.

Checks run one after another, and a failed one does not stop the others:

compiler     the graphs break no rule of the compiler; where neuronx-cc is on PATH, it lists every operator
certificate  the graphs are those that an export with --certify executed and compared with the model
load         graphs, weights and KV cache get onto the device
golden       teacher-forced, the tokens and logits that the exporting host recorded come back
chunks       a prompt gives the same logits whatever its chunk boundaries, to the bit inside one graph
neighbours   a request gives the same bits with all neighbours
slot copy    a prefix copied on the device is the prefix
snapshots    a slot gets back the state that was kept of it
token ids    those at the edges of the vocabulary make finite logits, and others are refused
latency      the time of one run of each graph, all rows at work and at the end of its context
memory       what the device has in use, by neuron-monitor

A table has what was seen, and what to do about each failure. The exit code is 1 where a check failed."""

EXAMPLES = """\
examples:
  optimum-cli neuron check llama/ --json check.json

on any CPU, to see what it does:
  optimum-cli export neuron --model model.gguf --target hlo out/ && optimum-cli neuron check out/ --runs 2
"""


class NeuronCheckCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo(name="check", help="Prove an artifact on the devices of this machine.")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        explain(parser, DESCRIPTION, EXAMPLES)
        add_artifact(parser)
        add_number(parser, "--runs", "RUNS", "timed runs of each graph", default=20)
        add_rank_options(parser)
        add_profile_option(parser)
        add_file(parser, "--json", "write everything, with the devices and the artifact's sizes")

    @reported_errors()
    def run(self) -> None:
        args = self.args
        from optimum_neuron.artifact.artifact import Artifact
        from optimum_neuron.runtime.profile import Profile

        # Before torch is imported: a wrong folder is reported at once.
        artifact = Artifact.open(args.artifact)
        with nullcontext() if args.profile is None else Profile(args.profile) as profile:
            from optimum_neuron.targets import RankOptions
            from optimum_neuron.tools.check.checks import check_artifact

            report = check_artifact(artifact, args.runs, RankOptions(args.rank_python, args.rank_timeout), profile)
        _print(report, str(args.artifact))
        print_profile(args.profile)
        if args.json is not None:
            write_json(args.json, report.to_dict())
        if not report.passed:
            raise SystemExit(1)


def _print(report: CheckReport, title: str) -> None:
    table = make_table(title, ("check", "result", "s", "what was seen"))
    for result in report.results:
        seen = result.problem or ", ".join(f"{name} {value}" for name, value in result.values.items())
        table.add_row(result.name, result.status, f"{result.seconds:.1f}", seen)
    terminal = console()
    terminal.print(table)
    for result in report.results:
        if result.remedy:
            terminal.print(f"{result.name}: {result.remedy}", soft_wrap=True)
