# SPDX-License-Identifier: Apache-2.0
"""optimum-cli neuron cache lookup: whether an export would find its graphs compiled. Keys are made elsewhere."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from typing import TYPE_CHECKING

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo
from optimum.commands.register.graph_options import add_graph_options, config_options
from optimum.commands.register.neuron_estimate import add_model_options

from optimum_neuron.cli import console, explain, hub_options, reported_errors
from optimum_neuron.config import NeuronConfig


if TYPE_CHECKING:
    from optimum_neuron.targets.cache.lookup import FoundGraph

MISSING = 3  # the exit code

DESCRIPTION = f"""\
Show whether all graphs that an export would compile are compiled already: in the compile cache, or with --repo in a Hub
repository. It takes the options of optimum-cli export neuron, and the model's config alone: no weights are downloaded or read.
The exit code is 0 where all are there, {MISSING} where one is missing, and 1 for an error.

Entries of the cache are checked by their digests, those of a repository when neuron cache sync brings them. For Neuron devices
the compiler has to be on PATH: its version is a part of what is looked for. Weights that the config ties are taken for
tied; a checkpoint that has other weights for both has graphs of its own. What --adapter merges is unknown without weights."""

EXAMPLES = """\
examples:
  optimum-cli neuron cache lookup --model meta-llama/Llama-3.1-8B --target trn2 --tensor-parallel-size 8 --batch-size 8
  optimum-cli neuron cache lookup --model checkpoint/ --target cpu --repo org/compiled

then, where all is in the repository:
  optimum-cli neuron cache sync --repo org/compiled --download-only
"""


class CacheLookupCommand(BaseOptimumCLICommand):
    """`optimum-cli neuron cache lookup`."""

    COMMAND = CommandInfo(name="lookup", help="Show whether an export would find its graphs compiled.")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        explain(parser, DESCRIPTION, EXAMPLES)
        group = parser.add_argument_group("where to look")
        group.add_argument("--repo", help="also in a model repository of the Hub, as org/name")
        group.add_argument("--repo-revision", help="branch, tag or commit of that repository (default: main)")
        group = parser.add_argument_group("model")
        add_model_options(group, required=True)
        group.add_argument(
            "--adapter",
            action="append",
            metavar="ADAPTER",
            help="refused: its graphs depend on its weights, which are not read",
        )
        add_graph_options(parser)

    @reported_errors()
    def run(self) -> None:
        args = self.args
        config = NeuronConfig.from_dict(config_options(vars(args)))
        if args.adapter is not None:
            raise ValueError(
                f"--adapter {args.adapter[0]} changes weights, and the graphs depend on which of them stay tied; weights are not read "
                f"here, so leave --adapter out to look for the graphs of the model itself"
            )
        if args.repo is None and args.repo_revision is not None:
            raise ValueError(f"--repo-revision {args.repo_revision} needs a repository; name it by --repo")

        from optimum_neuron.artifact.user_cache import cache_root
        from optimum_neuron.targets.cache.lookup import lookup

        found = lookup(args.model, config, **hub_options(args), repo=args.repo, repo_revision=args.repo_revision)
        _print(found, str(cache_root()), args.repo)
        if not all(each.is_there for each in found):
            raise SystemExit(MISSING)


def _print(found: Sequence[FoundGraph], cache: str, repo: str | None) -> None:
    from rich.table import Table

    table = Table(title=f"{len(found)} graphs", title_justify="left", padding=(0, 1, 0, 0))
    table.add_column("graph", overflow="fold")
    table.add_column("key", no_wrap=True)
    table.add_column("cache", no_wrap=True)
    if repo is not None:
        table.add_column(repo, overflow="fold")
    for each in found:
        table.add_row(each.graph, each.key[:8], each.here, *([each.shared] if each.shared is not None else []))
    terminal = console()
    terminal.print(table)
    places = [f"{sum(each.here == 'there' for each in found)} in {cache}"]
    if repo is not None:
        places.append(f"{sum(each.shared == 'there' for each in found)} in {repo}")
    missing = sum(not each.is_there for each in found)
    terminal.print(f"{', '.join(places)}; {missing} to be compiled", soft_wrap=True)
