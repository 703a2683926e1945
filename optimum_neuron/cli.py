# SPDX-License-Identifier: Apache-2.0
"""The common parts of optimum-cli commands: parsers, error reports, tables. It starts fast: no torch, and rich late."""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
import signal
import sys
import textwrap
from argparse import REMAINDER, SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from .errors import check_system, explain_error


if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from .artifact.artifact import Artifact

DEBUG_VARIABLE = "OPTIMUM_NEURON_DEBUG"
REPORTED_ERRORS = (ValueError, TypeError, OSError, RuntimeError, ImportError, MemoryError)


class CommandParser(ArgumentParser):
    """A parser of a command: its errors are one line, with the nearest option where one is misspelled."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse a word that only looks like an option, before it changes the meaning of the words around it."""
        if self._subparsers is None:  # else the words are another parser's
            self._refuse_unknown(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        if wrong is not None:
            message += _near(wrong[1], re.findall(r"[\w-]+", wrong[2]))
        self.exit(2, f"{self.prog}: error: {message}; {self.prog} --help lists all options\n")

    def _refuse_unknown(self, words: Sequence[str]) -> None:
        options = self._option_string_actions
        for word in words:
            flag = word.partition("=")[0]
            known = options.get(flag)
            if word == "--" or (known is not None and known.nargs == REMAINDER):
                return  # the rest are no options of this command
            if known is None and flag.startswith("--") and " " not in word:
                names = [name for name in options if name.startswith("--") and "_" not in name]
                self.error(f"unrecognized arguments: {flag}{_near(flag.replace('_', '-'), names)}")


def _near(word: str, known: Sequence[str]) -> str:
    """Return the end of a message about a word that is not known."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.65)
    return f"; did you mean {close[0]}?" if close else ""


def explain(parser: ArgumentParser, description: str | None, examples: str) -> None:
    """Give a command its texts, and keep their lines as they are.

    Options cannot be abbreviated: an abbreviation would be ambiguous between --like-this and --like_this.
    """
    parser.__class__ = CommandParser  # optimum made it
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.description, parser.epilog = description, examples
    parser.allow_abbrev = False


def add_option(group: Any, flag: str, **settings: Any) -> None:
    """Add an option `--like-this` that may also be spelled `--like_this`, which the help does not repeat.

    The help ends with the default, where that is a value rather than a choice left to the program.
    """
    if not isinstance(settings.get("default"), bool | None):
        settings["help"] += " (default: %(default)s)"
    action = group.add_argument(flag, **settings)
    alias = "--" + flag[2:].replace("-", "_")
    if alias != flag:
        group.add_argument(alias, **{**settings, "dest": action.dest, "default": SUPPRESS, "help": SUPPRESS})


@contextmanager
def reported_errors(on_interrupt: str = "interrupted") -> Iterator[None]:
    """End the process as a command line tool does: one line on stderr, and an exit code that says why.

    Exit codes are 1 for an error, 130 for Ctrl-C, and 143 for SIGTERM, which unwinds like Ctrl-C, so that cleanup runs.
    """
    _show_log_messages()
    os.environ.setdefault("PJRT_DEVICE", "CPU")  # else torch-xla warns that it chose it
    if not sys.stderr.isatty():  # no bars in a log file
        os.environ.update(HF_HUB_DISABLE_PROGRESS_BARS="1", TQDM_DISABLE="1")
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # an answer may have characters that stdout's encoding lacks
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        check_system()
        yield
    except KeyboardInterrupt:
        sys.stderr.write(f"{on_interrupt}\n")
        raise SystemExit(130) from None
    except REPORTED_ERRORS as error:
        if os.environ.get(DEBUG_VARIABLE):
            raise
        hint = f" ... ({DEBUG_VARIABLE}=1 shows all)"
        sys.stderr.write(f"error: {textwrap.shorten(explain_error(error), 600, placeholder=hint)}\n")
        raise SystemExit(1) from None
    finally:
        signal.signal(signal.SIGTERM, previous)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


class _StderrHandler(logging.Handler):
    """A handler that looks stderr up at each message: a live progress display replaces it while it runs."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(f"[optimum_neuron] {self.format(record)}\n")


def _show_log_messages() -> None:
    logger = logging.getLogger("optimum_neuron")
    verbosity = os.environ.get("TRANSFORMERS_VERBOSITY", "").upper()
    logger.setLevel(verbosity if verbosity in ("INFO", "DEBUG") else logging.WARNING)
    if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        logger.addHandler(_StderrHandler())


def write_json(path: Path, data: Any) -> None:
    """Write the document of `--json`, and make its folder if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def refuse_existing(option: str, path: Path | None) -> None:
    """Raise FileExistsError or NotADirectoryError where the file of an option exists, or lies in no folder."""
    if path is None:
        return
    if path.exists():
        raise FileExistsError(f"{option} {path} exists already; name another file, or remove it")
    above = next(parent for parent in path.absolute().parents if parent.exists())
    if not above.is_dir():
        raise NotADirectoryError(f"{option} {path} cannot be written: {above} is a file; name another folder")


def console(*, stderr: bool = False) -> Console:
    """Return a terminal for tables with plain names: rich would take `[red]` or `:smile:` in them for markup."""
    from rich.console import Console

    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def make_table(title: str, texts: Sequence[str], numbers: Sequence[str] = ()) -> Table:
    """Return a table with columns of texts, which may wrap, and of short values to the right."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in texts:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def graph_table(artifact: Artifact, title: str) -> Table:
    """Return a table with a row per graph, and the sizes of files."""
    from .artifact.artifact import GRAPHS_FOLDER, WEIGHTS_NAME

    files = {name: entry["size"] / 1e6 for name, entry in artifact.manifest["files"].items()}
    table = make_table(title, ("graph",), ("rows x tokens", "context", "MB"))
    for spec in artifact.graphs:
        decode = [f"{spec.batch_size} x 1"] if spec.has_decode else []
        chunk = [f"{spec.ctx_batch_size} x {spec.chunk_size}"] if spec.has_chunk else []
        size = sum(size for name, size in files.items() if name.startswith(f"{GRAPHS_FOLDER}/{spec.name}."))
        table.add_row(spec.name, " + ".join(decode + chunk), str(spec.context_length), f"{size:.1f}" if size else "-")
    table.add_section()
    table.add_row(WEIGHTS_NAME, "", "", f"{files.get(WEIGHTS_NAME, 0):.1f}")
    table.add_row("all files", "", "", f"{sum(files.values()):.1f}")
    return table
