# SPDX-License-Identifier: Apache-2.0
"""optimum-cli neuron lint: the rules of the Neuron compiler for a model's graphs."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from typing import TYPE_CHECKING

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo
from optimum.commands.register.neuron_options import (
    add_artifact,
    add_declared,
    add_model_options,
    add_quantization_options,
    add_size_options,
    given_options,
    hub_options,
)

from optimum_neuron.cli import console, explain, make_table, reported_errors
from optimum_neuron.config import HLO_TARGETS, NeuronConfig


if TYPE_CHECKING:
    from optimum_neuron.targets.neuron.graphs.io import GraphIO
    from optimum_neuron.targets.neuron.lint.cost import GraphCost
    from optimum_neuron.targets.neuron.lint.lint import Finding

DESCRIPTION = """\
Check a model's graphs by the rules of the Neuron compiler and device: operators, sorts, types, shapes, indices, constants, memory that
states share, collectives. It needs no Neuron software: it lowers graphs on this machine, from the config alone. If neuronx-cc is on
PATH, its own list of operators is used. An export for a Neuron target does the same, and stops at the first error. The exit code is 1
if there is an error.

--cost counts the work of one run of each graph on one core: device memory that it reads and writes ("read once": its weights, inputs and
cache), transposes, products, collectives, and the least time that memory and products take. It is a bound, and no estimate: see
optimum-cli neuron estimate."""

EXAMPLES = """\
examples:
  optimum-cli neuron lint artifact/
  optimum-cli neuron lint artifact/ --cost
  optimum-cli neuron lint --model meta-llama/Llama-3.1-8B --target trn2 --tensor-parallel-size 8 --sequence-length 4096
"""


class NeuronLintCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo(name="lint", help="Check whether the Neuron compiler can take a model's graphs.")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        explain(parser, DESCRIPTION, EXAMPLES)
        add_artifact(parser, nargs="?", help="folder with lowered graphs; or give --model")
        add_model_options(parser.add_argument_group("model"), required=False)
        group = parser.add_argument_group("graphs", "Of --model; an artifact has its own.")
        add_size_options(group)
        add_declared(group, [each for each in NeuronConfig.declared().values() if each.group == "devices"])
        add_quantization_options(parser)
        text = "rules of this target (default: the artifact's; for a model trn2; hlo: all; auto: this machine's)"
        parser.add_argument("--target", choices=("auto", *HLO_TARGETS), help=text)
        text = "also count what each graph moves and computes on a core"
        parser.add_argument("--cost", action="store_true", help=text)

    @reported_errors()
    def run(self) -> None:
        args = self.args
        options = given_options(args)
        if args.tensor_parallel_size is not None:
            options["tensor_parallel_size"] = args.tensor_parallel_size
        if (args.artifact is None) == (args.model is None):
            raise ValueError("name either an artifact's folder or --model, one of them")
        if args.artifact is not None and options:
            raise ValueError(f"{args.artifact} has its own {next(iter(options))}; give sizes with --model only")
        config = None if args.model is None else NeuronConfig.from_dict({**options, "target": args.target or "trn2"})

        from optimum_neuron.targets.neuron.sdk.stacks import check_lowering, check_reading

        if config is None:
            check_reading()
        else:
            check_lowering()
        from optimum_neuron.targets.neuron.lint.cost import graph_cost
        from optimum_neuron.targets.neuron.lint.lint import installed_operators, lint

        operators, findings, costs = installed_operators(), [], []
        target, graphs = _graphs(args, config)
        for name, data, io in graphs:
            findings += lint(name, data, io, target, operators)
            if args.cost:
                costs.append(graph_cost(name, data, io, target))
        if costs:
            _print_costs(costs, target)
        _print_findings(findings)
        if any(finding.severity == "error" for finding in findings):
            raise SystemExit(1)


def _graphs(args: Namespace, config: NeuronConfig | None) -> tuple[str, Iterable[tuple[str, bytes, GraphIO]]]:
    """Return the target of the rules, and the name, HLO and description of each graph."""
    if config is None:
        from optimum_neuron.artifact.artifact import Artifact
        from optimum_neuron.targets.neuron.lint.lint import artifact_graphs, artifact_target

        artifact = Artifact.open(args.artifact)
        return artifact_target(artifact, args.target), artifact_graphs(artifact)
    from optimum_neuron.targets.neuron.lowering.lower_all import model_graphs
    from optimum_neuron.targets.neuron.sdk.devices import resolve_lowered_target

    lowered = model_graphs(args.model, config, **hub_options(args))
    return resolve_lowered_target(config.target), ((graph.name, graph.hlo, graph.io) for graph in lowered)


def _print_costs(costs: list[GraphCost], target: str) -> None:
    from optimum_neuron.targets.neuron.sdk.hardware import CHIPS

    numbers = ("read\nMB", "read\nonce", "written\nMB", "transp.\nMB", "GFLOP", "coll.", "coll.\nMB", "ms")
    table = make_table(f"one run on one core of {target}; MB are 1e6 bytes", ("graph",), numbers)
    for cost in costs:
        moved = (cost.read, cost.needed, cost.written, cost.transposed, cost.collective_bytes)
        *of_memory, of_collectives = (f"{size / 1e6:,.1f}" for size in moved)
        table.add_row(
            cost.name,
            *of_memory,
            f"{cost.total_flops / 1e9:,.1f}",
            str(sum(cost.collectives.values())),
            of_collectives,
            f"{cost.seconds(target) * 1e3:,.2f}" if target in CHIPS else "-",
        )
    terminal = console()
    terminal.print(table)
    for cost in costs:
        for name, count in cost.kernels.items():
            terminal.print(f"{cost.name} calls {name} {count} times, counted as what it stands for")


def _print_findings(findings: list[Finding]) -> None:
    if not findings:
        console().print("no rule is broken")
        return
    table = make_table(f"{len(findings)} findings", ("graph", "where", "problem", "remedy"))
    for finding in findings:
        where = " in ".join(part for part in (finding.instruction, finding.module) if part)
        code = f" ({finding.code})" if finding.code else ""
        table.add_row(finding.graph, where, f"{finding.severity}: {finding.problem}{code}", finding.remedy)
    console().print(table)
