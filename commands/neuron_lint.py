# SPDX-License-Identifier: Apache-2.0
"""optimum-cli neuron lint: whether the Neuron compiler can take a model's graphs. The rules are elsewhere."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo
from optimum.commands.register.neuron_estimate import add_model_options, add_size_options, given_options

from optimum_neuron.cli import add_option, console, explain, reported_errors
from optimum_neuron.config import HLO_TARGETS, NeuronConfig


if TYPE_CHECKING:
    from optimum_neuron.targets.neuron.lint.lint import Finding

DESCRIPTION = """\
Check a model's graphs against what the Neuron compiler and device take: operators, types, shapes, top-k, indices, constants,
memory shared by states, collectives. It needs no Neuron software: graphs are lowered on this machine, from the config
alone. Where neuronx-cc is on PATH, its own list of operators is used.

Exporting for a Neuron target does the same and stops at the first error. The exit code is 1 where there is one."""

EXAMPLES = """\
examples:
  optimum-cli neuron lint artifact/
  optimum-cli neuron lint --model meta-llama/Llama-3.1-8B --target trn2 --tensor-parallel-size 8 --sequence-length 4096
"""


class NeuronLintCommand(BaseOptimumCLICommand):
    """`optimum-cli neuron lint`."""

    COMMAND = CommandInfo(name="lint", help="Check whether the Neuron compiler can take a model's graphs.")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        explain(parser, DESCRIPTION, EXAMPLES)
        parser.add_argument("artifact", type=Path, nargs="?", help="folder with lowered graphs; or give --model")
        add_model_options(parser.add_argument_group("model"), required=False)
        group = parser.add_argument_group("graphs", "Of --model; an artifact has its own.")
        add_size_options(group)
        add_option(
            group, "--tensor-parallel-size", type=int, metavar="CORES", help="cores that share one copy (default: 1)"
        )
        parser.add_argument(
            "--target", choices=HLO_TARGETS, help="whose rules (default: the artifact's; for a model trn2; hlo: all)"
        )

    def run(self) -> None:
        with reported_errors():
            if _lint(self.args):
                raise SystemExit(1)


def _lint(args: Namespace) -> bool:
    """Prints all findings; whether one is an error."""
    options = given_options(args)
    if args.tensor_parallel_size is not None:
        options["tensor_parallel_size"] = args.tensor_parallel_size
    if (args.artifact is None) == (args.model is None):
        raise ValueError("name either an artifact's folder or --model, one of them")
    if args.artifact is not None and options:
        raise ValueError(f"{args.artifact} has its own {next(iter(options))}; give sizes with --model only")
    config = None if args.model is None else NeuronConfig.from_dict({**options, "target": args.target or "trn2"})

    from optimum_neuron.artifacts.artifact import Artifact
    from optimum_neuron.targets.neuron.lowering.requirements import check_reading

    check_reading()
    from optimum_neuron.targets.neuron.lint.lint import installed_operators, lint_artifact

    operators = installed_operators()
    if config is None:
        findings = lint_artifact(Artifact.open(args.artifact), args.target, operators)
    else:
        from optimum_neuron.targets.neuron.lint.model import lint_model

        findings = lint_model(
            args.model,
            config,
            operators,
            revision=args.revision,
            token=args.token,
            trust_remote_code=args.trust_remote_code,
        )
    _print(findings)
    return any(finding.severity == "error" for finding in findings)


def _print(findings: list[Finding]) -> None:
    from rich.table import Table

    if not findings:
        console().print("no rule is broken")
        return
    table = Table("graph", "where", "problem", "remedy", title=f"{len(findings)} findings", title_justify="left")
    for finding in findings:
        where = " in ".join(part for part in (finding.instruction, finding.module) if part)
        code = f" ({finding.code})" if finding.code else ""
        table.add_row(finding.graph, where, f"{finding.severity}: {finding.problem}{code}", finding.remedy)
    console().print(table)
