# SPDX-License-Identifier: Apache-2.0
"""optimum-cli neuron cache: compiled graphs of this machine: listed, looked up, checked, removed, exchanged."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, TypeVar

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo
from optimum.commands.register.neuron_options import add_graph_options, add_model_options, hub_options, read_declared

from optimum_neuron.cli import add_option, console, explain, make_table, reported_errors
from optimum_neuron.config import NeuronConfig
from optimum_neuron.targets.cache.units import parse_age, parse_size


if TYPE_CHECKING:
    from optimum_neuron.targets.cache.entries import CacheEntry
    from optimum_neuron.targets.cache.lookup import FoundGraph

_Value = TypeVar("_Value")

DESCRIPTION = """\
Look at the compile cache: an entry for each compiled graph, in OPTIMUM_NEURON_CACHE or else in the Hub's home. A graph that
is compiled again, for whatever weights and by whatever version of this package, is found there."""

LS = """\
List the entries of the compile cache, the last used first."""

PRUNE = """\
Make room in the compile cache: the entries that were used longest ago go first. An export compiles again what it needs of them.
Exports may run meanwhile. With OPTIMUM_NEURON_CACHE_SIZE=10GB set, every export keeps the cache that small by itself."""

PRUNE_EXAMPLES = """\
examples:
  optimum-cli neuron cache prune --max-size 10GB
  optimum-cli neuron cache prune --older-than 30d --dry-run
"""

VERIFY = """\
Check every file of the compile cache by the digest that was stored with it. An export does so for what it uses. The exit code is 1
where an entry is not what was stored, and stays."""

SYNC = """\
Exchange compiled graphs with a Hub repository: entries that one side lacks are taken from the other. What is downloaded enters the
cache only as what its digests say. For Neuron devices it is native code that others have compiled: name only repositories
of authors that you trust. HF_HUB_OFFLINE is honoured. The exit code is 1 where an entry is not what was stored."""


MISSING = 3  # the exit code

LOOKUP = f"""\
Show whether all graphs that an export would compile are compiled already: in the compile cache, or with --repo in a Hub
repository. It takes the options of optimum-cli export neuron, and the model's config alone: no weights are downloaded or read.
The exit code is 0 where all are there, {MISSING} where one is missing, and 1 for an error.

Entries of the cache are checked by their digests, those of a repository when neuron cache sync brings them. For Neuron devices
the compiler has to be on PATH: its version is a part of what is looked for. Weights that the config ties are taken for
tied; a checkpoint that has other weights for both has graphs of its own. What --adapter merges is unknown without weights."""

LOOKUP_EXAMPLES = """\
examples:
  optimum-cli neuron cache lookup --model meta-llama/Llama-3.1-8B --target trn2 --tensor-parallel-size 8 --batch-size 8
  optimum-cli neuron cache lookup --model checkpoint/ --target cpu --repo org/compiled

then, where all is in the repository:
  optimum-cli neuron cache sync --repo org/compiled --download-only
"""


def parsed(parse: Callable[[str], _Value]) -> Callable[[str], _Value]:
    """An argparse type of a function that raises ValueError."""

    def convert(text: str) -> _Value:
        try:
            return parse(text)
        except ValueError as error:
            raise ArgumentTypeError(str(error)) from None

    return convert


class CacheListCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo(name="ls", help="List the entries of the compile cache.")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        explain(parser, LS, "example:\n  optimum-cli neuron cache ls\n")

    @reported_errors()
    def run(self) -> None:
        from optimum_neuron.artifact.user_cache import cache_root
        from optimum_neuron.targets.cache.entries import list_entries

        entries = list_entries()
        if entries:
            _print_entries(entries, str(cache_root()))
        console().print(f"{_count(entries)} in {cache_root()}", soft_wrap=True)


class CachePruneCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo(name="prune", help="Remove old entries of the compile cache.")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        explain(parser, PRUNE, PRUNE_EXAMPLES)
        text = "what all entries may take together, as in 500MB or 10GB (default: OPTIMUM_NEURON_CACHE_SIZE)"
        add_option(parser, "--max-size", type=parsed(parse_size), metavar="SIZE", help=text)
        text = "remove what was not used for so long, as in 12h, 30d or 2w"
        add_option(parser, "--older-than", type=parsed(parse_age), metavar="AGE", help=text)
        add_option(parser, "--dry-run", action="store_true", help="list what would be removed, and remove nothing")

    @reported_errors()
    def run(self) -> None:
        from optimum_neuron.targets.cache.entries import SIZE_VARIABLE, prune, size_limit

        largest = self.args.max_size
        if largest is None and self.args.older_than is None:
            largest = size_limit()
            if largest is None:
                raise ValueError(
                    f"nothing says what to remove; give --max-size or --older-than, or set {SIZE_VARIABLE}"
                )
        removed, kept = prune(max_size=largest, older_than=self.args.older_than, dry_run=self.args.dry_run)
        if removed:
            _print_entries(removed, "would be removed" if self.args.dry_run else "removed")
        would = "would be " if self.args.dry_run else ""
        console().print(f"{_count(removed)} {would}removed; {_count(kept)} {would}left", soft_wrap=True)


class CacheVerifyCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo(name="verify", help="Check every file of the compile cache by its digest.")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        explain(parser, VERIFY, "example:\n  optimum-cli neuron cache verify --remove\n")
        add_option(parser, "--remove", action="store_true", help="remove the entries that are not what was stored")

    @reported_errors()
    def run(self) -> None:
        from optimum_neuron.targets.cache.entries import verify

        checked = list(verify(remove=self.args.remove))
        broken = [(entry, problem) for entry, problem in checked if problem is not None]
        terminal = console()
        for entry, problem in broken:
            done = "removed" if self.args.remove else "run again with --remove"
            terminal.print(f"{entry.path} is broken: {problem}; {done}", soft_wrap=True)
        terminal.print(f"{_count([entry for entry, _ in checked])} checked, {len(broken)} broken")
        if broken and not self.args.remove:
            raise SystemExit(1)


class CacheSyncCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo(name="sync", help="Exchange entries of the compile cache with a Hub repository.")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        explain(parser, SYNC, "example:\n  optimum-cli neuron cache sync --repo org/compiled --download-only\n")
        parser.add_argument("--repo", required=True, help="model repository of the Hub, as org/name")
        parser.add_argument("--revision", help="branch of the repository (default: main)")
        parser.add_argument("--token", help="Hub token (default: the one that hf stored)")
        ways = parser.add_mutually_exclusive_group()
        add_option(ways, "--download-only", action="store_true", help="upload nothing")
        add_option(ways, "--upload-only", action="store_true", help="download nothing")

    @reported_errors("interrupted; what was done stays")
    def run(self) -> None:
        from optimum_neuron.targets.cache.hub import sync

        args = self.args
        ways = {"download": not args.upload_only, "upload": not args.download_only}
        done = sync(args.repo, revision=args.revision, token=args.token, **ways)
        terminal = console()
        for name, problem in done.refused.items():
            terminal.print(f"{name} is broken, and was not taken: {problem}", soft_wrap=True)
        counts = f"{len(done.downloaded)} downloaded, {len(done.uploaded)} uploaded, {len(done.refused)} broken"
        terminal.print(f"{args.repo}: {counts}", soft_wrap=True)
        if done.refused:
            raise SystemExit(1)


class CacheLookupCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo(name="lookup", help="Show whether an export would find its graphs compiled.")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        explain(parser, LOOKUP, LOOKUP_EXAMPLES)
        group = parser.add_argument_group("where to look")
        group.add_argument("--repo", help="also in a model repository of the Hub, as org/name")
        group.add_argument("--repo-revision", help="branch, tag or commit of that repository (default: main)")
        group = parser.add_argument_group("model")
        add_model_options(group, required=True)
        text = "refused: its graphs depend on its weights, which are not read"
        group.add_argument("--adapter", action="append", metavar="ADAPTER", help=text)
        add_graph_options(parser)

    @reported_errors()
    def run(self) -> None:
        args = self.args
        config = NeuronConfig.from_dict(read_declared(args, NeuronConfig))
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
        _print_found(found, str(cache_root()), args.repo)
        if not all(each.is_there for each in found):
            raise SystemExit(MISSING)


class NeuronCacheCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo(name="cache", help="Look at what was compiled on this machine, check it, make it smaller.")
    SUBCOMMANDS = tuple(
        CommandInfo(command.COMMAND.name, command.COMMAND.help, subcommand_class=command)
        for command in (CacheListCommand, CacheLookupCommand, CachePruneCommand, CacheVerifyCommand, CacheSyncCommand)
    )

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        explain(parser, DESCRIPTION, "example:\n  optimum-cli neuron cache ls\n")


def _count(entries: Sequence[CacheEntry]) -> str:
    from rich.filesize import decimal

    number = "1 entry" if len(entries) == 1 else f"{len(entries)} entries"
    return f"{number} of {decimal(sum(entry.size for entry in entries))}"


def _print_entries(entries: Sequence[CacheEntry], title: str) -> None:
    from rich.filesize import decimal

    table = make_table(title, ("graph", "target", "compiler"), ("size", "last use", "key"))
    for entry in entries:
        used = datetime.fromtimestamp(entry.last_use, timezone.utc).strftime("%Y-%m-%d %H:%M")
        about = entry.about
        table.add_row(about.graph, about.target, about.compiler, decimal(entry.size), used, entry.path.name[:8])
    console().print(table)


def _print_found(found: Sequence[FoundGraph], cache: str, repo: str | None) -> None:
    table = make_table(f"{len(found)} graphs", ("graph", "key", "cache", *([] if repo is None else [repo])))
    for each in found:
        table.add_row(each.graph, each.key[:8], each.here, *([each.shared] if each.shared is not None else []))
    terminal = console()
    terminal.print(table)
    places = [f"{sum(each.here == 'there' for each in found)} in {cache}"]
    places += [] if repo is None else [f"{sum(each.shared == 'there' for each in found)} in {repo}"]
    missing = sum(not each.is_there for each in found)
    terminal.print(f"{', '.join(places)}; {missing} to be compiled", soft_wrap=True)
