# SPDX-License-Identifier: Apache-2.0
"""optimum-cli neuron lint: whether the Neuron compiler can take a model's graphs. The rules are elsewhere."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo
from optimum.commands.register.graph_options import add_device_options, add_quantization_options, add_size_options
from optimum.commands.register.neuron_estimate import add_model_options, given_options

from optimum_neuron.cli import console, explain, hub_options, reported_errors
from optimum_neuron.config import HLO_TARGETS, NeuronConfig


if TYPE_CHECKING:
    from rich.table import Table

    from optimum_neuron.targets.neuron.graph_io import GraphIO
    from optimum_neuron.targets.neuron.lint.cost import GraphCost
    from optimum_neuron.targets.neuron.lint.expert_costs import ExpertCost
    from optimum_neuron.targets.neuron.lint.lint import Finding
    from optimum_neuron.targets.neuron.lint.sum_costs import SumCost

DESCRIPTION = """\
Check a model's graphs against what the Neuron compiler and device take: operators, sorts, types, shapes, indices, constants,
memory shared by states, collectives. It needs no Neuron software: graphs are lowered on this machine, from the config
alone. Where neuronx-cc is on PATH, its own list of operators is used.

Exporting for a Neuron target does the same and stops at the first error. The exit code is 1 where there is one.

--cost counts what one run of each graph has to do on one core: what it reads and writes of device memory (READ ONCE is what its
weights, inputs and cache alone would take), how much of them it transposes, products, collectives, and the time that
memory and products leave possible. It is a bound, not an estimate: see optimum-cli neuron estimate. Of routed experts it shows the
form that each graph computes them in, chosen by the same count, and what computing every expert for every token would take.
Of sums over cores it shows, for each graph that has the choice, which form it has and what both take: every core gets the whole sum,
or its part of the tokens, computes what follows token by token of that part alone, and gathers where others need all."""

EXAMPLES = """\
examples:
  optimum-cli neuron lint artifact/
  optimum-cli neuron lint artifact/ --cost
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
        add_device_options(group)
        add_quantization_options(parser)
        parser.add_argument(
            "--target",
            choices=("auto", *HLO_TARGETS),
            help="rules of this target (default: the artifact's; for a model trn2; hlo: all; auto: this machine's)",
        )
        parser.add_argument(
            "--cost", action="store_true", help="also count what each graph moves and computes on a core"
        )

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

        from optimum_neuron.targets.neuron.lowering.requirements import check_lowering, check_reading

        if config is None:
            check_reading()
        else:
            check_lowering()
        from optimum_neuron.targets.neuron.lint.cost import graph_cost
        from optimum_neuron.targets.neuron.lint.expert_costs import expert_costs
        from optimum_neuron.targets.neuron.lint.lint import installed_operators, lint
        from optimum_neuron.targets.neuron.lint.sum_costs import sum_cost

        operators, findings, costs, experts, sums = installed_operators(), [], [], [], []
        target, graphs = _graphs(args, config)
        for name, data, io in graphs:
            findings += lint(name, data, io, target, operators)
            if args.cost:
                costs.append(graph_cost(name, data, io, target))
                experts += [(name, each) for each in expert_costs(name, data, io, target)]
                sums.append((name, sum_cost(data, io)))
        if costs:
            _print_costs(costs, target)
        if experts:
            _print_experts(experts, target)
        _print_sums([(name, cost) for name, cost in sums if cost is not None], target)
        _print(findings)
        if any(finding.severity == "error" for finding in findings):
            raise SystemExit(1)


def _graphs(args: Namespace, config: NeuronConfig | None) -> tuple[str, Iterable[tuple[str, bytes, GraphIO]]]:
    """Return the target of the rules, and the name, HLO and description of each graph."""
    if config is None:
        from optimum_neuron.artifact.artifact import Artifact
        from optimum_neuron.targets.neuron.lint.lint import artifact_graphs, artifact_target

        artifact = Artifact.open(args.artifact)
        return artifact_target(artifact, args.target), artifact_graphs(artifact)
    from optimum_neuron.targets.neuron.lint.model import model_graphs
    from optimum_neuron.targets.neuron.sdk.devices import resolve_lowered_target

    lowered = model_graphs(args.model, config, **hub_options(args))
    return resolve_lowered_target(config.target), ((graph.name, graph.hlo, graph.io) for graph in lowered)


def _table(title: str, texts: Sequence[str], numbers: Sequence[str]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", padding=(0, 1, 0, 0))
    table.add_column("graph", overflow="fold", ratio=1)
    for name in texts:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _print_costs(costs: list[GraphCost], target: str) -> None:
    numbers = ("read\nMB", "read\nonce", "written\nMB", "transp.\nMB", "GFLOP", "coll.", "coll.\nMB", "ms")
    table = _table(f"one run on one core of {target}; MB are 1e6 bytes", (), numbers)
    for cost in costs:
        table.add_row(
            cost.name,
            *(_megabytes(size) for size in (cost.read, cost.needed, cost.written, cost.transposed)),
            f"{cost.total_flops / 1e9:,.1f}",
            str(sum(cost.collectives.values())),
            _megabytes(cost.collective_bytes),
            _milliseconds(cost.seconds(target), target),
        )
    terminal = console()
    terminal.print(table)
    for cost in costs:
        for name, count in cost.kernels.items():
            terminal.print(f"{cost.name} calls {name} {count} times, counted as what it stands for")


def _print_experts(experts: list[tuple[str, ExpertCost]], target: str) -> None:
    title = "of these, routed experts; before: every expert would compute every token"
    numbers = [f"{unit}\n{when}" for unit in ("MB", "GFLOP", "ms") for when in ("before", "after")]
    table = _table(title, ("layers", "form"), numbers)
    for name, cost in experts:
        both = cost.before, cost.after
        table.add_row(
            name,
            str(cost.layers),
            str(cost.form),
            *(_megabytes(each.moved) for each in both),
            *(f"{each.flops / 1e9:,.1f}" for each in both),
            *(_milliseconds(each, target) for each in cost.seconds(target)),
        )
    console().print(table)


def _print_sums(sums: list[tuple[str, SumCost]], target: str) -> None:
    if not sums:
        return
    title = "sums over cores and what follows from them token by token; split: of a part of the tokens on each core"
    numbers = [f"{unit}\n{form}" for unit in ("coll.", "MB", "1e6", "ms") for form in ("whole", "split")]
    table = _table(title, ("form",), numbers)
    for name, cost in sums:
        table.add_row(
            name,
            cost.form,
            *(str(each.collectives) for each in cost.both),
            *(_megabytes(each.sent) for each in cost.both),
            *(_megabytes(each.elements.total()) for each in cost.both),
            *(_milliseconds(each, target) for each in cost.seconds(target)),
        )
    console().print(table)
    console().print("MB: sent by a core; 1e6: numbers that elementwise operators and reductions take")


def _milliseconds(seconds: float, target: str) -> str:
    from optimum_neuron.targets.neuron.sdk.hardware import CHIPS

    return f"{seconds * 1e3:,.2f}" if target in CHIPS else "-"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f}"


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
