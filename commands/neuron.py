# SPDX-License-Identifier: Apache-2.0
"""optimum-cli neuron: its subcommands, and `inspect`, which shows an artifact."""

from __future__ import annotations

from argparse import ArgumentParser

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo
from optimum.commands.register.neuron_bench import NeuronBenchCommand
from optimum.commands.register.neuron_cache import NeuronCacheCommand
from optimum.commands.register.neuron_chat import NeuronChatCommand
from optimum.commands.register.neuron_check import NeuronCheckCommand
from optimum.commands.register.neuron_env import NeuronEnvCommand
from optimum.commands.register.neuron_estimate import NeuronEstimateCommand
from optimum.commands.register.neuron_generate import NeuronGenerateCommand
from optimum.commands.register.neuron_golden import NeuronGoldenCommand
from optimum.commands.register.neuron_hub import NeuronCardCommand, NeuronPushCommand
from optimum.commands.register.neuron_lint import NeuronLintCommand
from optimum.commands.register.neuron_options import add_artifact, add_file
from optimum.commands.register.neuron_serve import NeuronServeCommand
from optimum.commands.register.neuron_tune import NeuronTuneCommand

from optimum_neuron.cli import console, explain, reported_errors, write_json
from optimum_neuron.version import __version__


DESCRIPTION = """\
Show the sizes, graphs and versions of an artifact, and whether its graphs are certified. Nothing is loaded.

--html writes one page that asks for no other file: steps, memory by core, operators and cost of each graph, the certificate,
quantized weights, and speeds of a bench.json in its folder. --json writes the same as data. Both first compare the digests of all
files but the weights."""

EXAMPLES = """\
examples:
  optimum-cli neuron inspect llama-trn2/
  optimum-cli neuron inspect llama-trn2/ --html llama.html
"""


OVERVIEW = """\
Export, run, serve and check causal language models with graphs of fixed sizes. Each command has a --help of its own."""

GUIDE = """\
examples:
  optimum-cli neuron generate HuggingFaceTB/SmolLM2-135M-Instruct --prompt "What is a prefill?"
  optimum-cli neuron serve smollm2/
"""


class NeuronInspectCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo(name="inspect", help="Show the sizes, graphs and versions of an artifact.")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        explain(parser, DESCRIPTION, EXAMPLES)
        add_artifact(parser)
        add_file(parser, "--html", "write a page that a browser shows: all that is known of the artifact")
        add_file(parser, "--json", "write the same as data")

    @reported_errors()
    def run(self) -> None:
        from optimum_neuron.artifact.artifact import Artifact

        artifact = Artifact.open(self.args.artifact)
        outputs = [path for path in (self.args.html, self.args.json) if path is not None]
        if not outputs:
            from optimum_neuron.tools.inspect.collect import print_artifact

            print_artifact(artifact, console())
            return
        from optimum_neuron.artifact.filesystem import replace_file
        from optimum_neuron.tools.inspect.collect import check_output, collect_facts

        for path in outputs:
            check_output(artifact, path)
        facts = collect_facts(artifact)
        if self.args.html is not None:
            from optimum_neuron.tools.inspect.html import render_page

            self.args.html.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self.args.html, render_page(facts))
        if self.args.json is not None:
            write_json(self.args.json, facts.to_dict())
        for path in outputs:
            print(path)


class NeuronCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo(name="neuron", help="Estimate what to export; inspect, run and check what was exported.")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        explain(parser, OVERVIEW, GUIDE)
        parser.add_argument("--version", action="version", version=f"optimum-neuron-runtime {__version__}")

    SUBCOMMANDS = tuple(
        CommandInfo(command.COMMAND.name, command.COMMAND.help, subcommand_class=command)
        for command in (
            NeuronEstimateCommand,
            NeuronTuneCommand,
            NeuronLintCommand,
            NeuronGoldenCommand,
            NeuronInspectCommand,
            NeuronGenerateCommand,
            NeuronChatCommand,
            NeuronServeCommand,
            NeuronCheckCommand,
            NeuronBenchCommand,
            NeuronCardCommand,
            NeuronPushCommand,
            NeuronCacheCommand,
            NeuronEnvCommand,
        )
    )


REGISTER_COMMANDS = [NeuronCommand]
