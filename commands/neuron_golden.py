# SPDX-License-Identifier: Apache-2.0
"""optimum-cli neuron golden: modules for whoever has the Neuron compiler, and what it made of them."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo

from optimum_neuron.cli import console, explain, reported_errors
from optimum_neuron.config import HLO_TARGETS


DESCRIPTION = """\
Write a folder of small HLO modules, each with one form that this package compiles for Neuron: decode, chunks, cache blocks, ranks, types,
experts, recurrences, the sampler. Its run_compiler.py calls neuronx-cc on each, and needs nothing else: any x86 Linux with neuronx-cc, no
device, no other package. It writes result.json, which --read shows: what compiles, in what time, and how many instructions.

Writing needs torch 2.9 with torch-xla, as an export for Neuron does. Reading needs neither."""

EXAMPLES = """\
examples:
  optimum-cli neuron golden golden/        # then, where neuronx-cc is: python3 golden/run_compiler.py
  optimum-cli neuron golden golden/ --target inf2
  optimum-cli neuron golden --read result.json
"""


class NeuronGoldenCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo(name="golden", help="Write modules that show what neuronx-cc takes; read its result.")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        explain(parser, DESCRIPTION, EXAMPLES)
        parser.add_argument("folder", nargs="?", type=Path, help="a new folder for the modules; or give --read")
        parser.add_argument(
            "--read", type=Path, metavar="FILE", help="show the result.json that run_compiler.py wrote"
        )
        devices = [target for target in HLO_TARGETS if target != "hlo"]
        parser.add_argument("--target", choices=devices, help="compile for this device (default: trn2)")

    @reported_errors()
    def run(self) -> None:
        folder, result, target = self.args.folder, self.args.read, self.args.target
        if (folder is None) == (result is None):
            raise ValueError("name either a new folder or --read FILE, one of them")
        if result is not None:
            if target is not None:
                raise ValueError(
                    f"--target {target} is for new modules, and --read shows those of {result}; leave it out"
                )
            from optimum_neuron.tools.golden.read import print_result, read_result

            print_result(read_result(result), console())
            return
        from optimum_neuron.tools.golden.write import write_golden

        names = write_golden(folder, target or "trn2")
        print(f"{folder} has {len(names)} modules; where neuronx-cc is: python3 {folder / 'run_compiler.py'}")
