# SPDX-License-Identifier: Apache-2.0
"""optimum-cli neuron: its subcommands, and `inspect`, which shows an artifact."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo
from optimum.commands.register.neuron_bench import NeuronBenchCommand
from optimum.commands.register.neuron_cache import NeuronCacheCommand
from optimum.commands.register.neuron_chat import NeuronChatCommand
from optimum.commands.register.neuron_check import NeuronCheckCommand
from optimum.commands.register.neuron_env import NeuronEnvCommand
from optimum.commands.register.neuron_estimate import NeuronEstimateCommand
from optimum.commands.register.neuron_generate import NeuronGenerateCommand
from optimum.commands.register.neuron_hub import NeuronCardCommand, NeuronPushCommand
from optimum.commands.register.neuron_lint import NeuronLintCommand
from optimum.commands.register.neuron_serve import NeuronServeCommand
from optimum.commands.register.neuron_tune import NeuronTuneCommand

from optimum_neuron.cli import add_artifact, add_file, add_option, console, explain, reported_errors, write_json
from optimum_neuron.version import __version__


DESCRIPTION = """\
Show the sizes, graphs and versions of an artifact, and whether its graphs are certified. Nothing is loaded.

--html writes one page that asks for no other file: steps, memory by core, operators and cost of each graph, the certificate,
quantized weights, and recorded speeds. --json writes the same as data. Both first compare the digests of all files but the weights.

--verify repeats the certificate of an artifact with HLO graphs (inf2, trn1, trn2, trn3, hlo). An export with --certify executes the
graphs by XLA on its CPU, all ranks at once, and compares them with the model. This machine needs torch-xla, and no device. It compares
the digest of every graph, lints them, executes them on the same inputs, and compares with the model's numbers. A line shows "difference
of bound"; the bound is 16 times the measured effect of moving each module's results by a unit in the last place. Graphs in bfloat16 are
also executed in float32, where a mistake stands out from rounding. Of a large model the first layers of each kind are lowered again,
and executed with the artifact's weights. The exit code is 1 if anything but a version differs."""

EXAMPLES = """\
examples:
  optimum-cli neuron inspect llama-trn2/
  optimum-cli neuron inspect llama-trn2/ --html llama.html
  optimum-cli neuron inspect llama-trn2/ --verify
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
        bench = "speeds to show, of neuron bench --json (default: those that neuron card recorded)"
        add_file(parser, "--bench", bench)
        parser.add_argument("--verify", action="store_true", help="repeat what its certificate says, on this CPU")
        add_option(parser, "--trust-remote-code", action="store_true", help="run Python code that the artifact brings")

    @reported_errors()
    def run(self) -> None:
        if self.args.trust_remote_code and not self.args.verify:
            raise ValueError("--trust-remote-code is for --verify: nothing else of an artifact is run here")
        outputs = [name for name in ("html", "json", "bench") if getattr(self.args, name) is not None]
        if self.args.verify and outputs:
            raise ValueError(f"--verify prints what it finds and writes no file; leave out --{outputs[0]}")
        if not self.args.verify:
            _inspect(self.args)
        elif not _verify(self.args.artifact, trust_remote_code=self.args.trust_remote_code):
            raise SystemExit(1)


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


def _inspect(args: Namespace) -> None:
    from optimum_neuron.artifact.artifact import Artifact
    from optimum_neuron.hub.measurements import Measurements, identity, read_measurements, with_bench

    artifact = Artifact.open(args.artifact)
    measured = None
    if args.bench is not None:
        measured = with_bench(Measurements(identity(artifact)), args.bench, artifact)
    outputs = [path for path in (args.html, args.json) if path is not None]
    if not outputs:
        from optimum_neuron.tools.inspect.text import print_artifact

        print_artifact(artifact, measured or read_measurements(artifact), console())
        return
    from optimum_neuron.artifact.filesystem import replace_file
    from optimum_neuron.tools.inspect.collect import check_output, collect_facts

    for path in outputs:
        check_output(artifact, path)
    facts = collect_facts(artifact, measured)
    if args.html is not None:
        from optimum_neuron.tools.inspect.html import render_page

        args.html.parent.mkdir(parents=True, exist_ok=True)
        replace_file(args.html, render_page(facts))
    if args.json is not None:
        write_json(args.json, facts.to_dict())
    for path in outputs:
        print(path)


def _verify(folder: Path, *, trust_remote_code: bool) -> bool:
    """Print what was certified and what was found here; return whether all of it holds."""
    from rich.table import Table

    from optimum_neuron.artifact.artifact import Artifact

    artifact = Artifact.open(folder)

    from optimum_neuron.tools.certify.verify import verify_certificate

    lines = verify_certificate(artifact, trust_remote_code=trust_remote_code)
    table = Table("", "certified", "here", "", title=f"certificate of {folder}", title_justify="left")
    for line in lines:
        note = "same" if line.holds and line.certified == line.found else "holds" if line.holds else "DIFFERS"
        table.add_row(line.subject, line.certified, line.found, note)
    console().print(table)
    return all(line.holds for line in lines)


REGISTER_COMMANDS = [NeuronCommand]
