# SPDX-License-Identifier: Apache-2.0
"""Wrong command lines end with one sentence and an exit code, write nothing, and show no traceback."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from broken_files import Files
from command_lines import LINES, REFUSED, USAGE, Line
from helpers import export_tiny
from optimum.commands import optimum_cli
from parsers import command_classes, parser_of


# These also run as processes of their own: one that is not understood, one that is refused when torch is loaded; the others by the
# full profile.
QUICK = [
    next(line for line in LINES if line.code == code and word in line.words)
    for code, word in ((USAGE, "neuron"), (REFUSED, "{adapter:rank}"))
]
SAMPLE = [line for line in LINES[:: len(LINES) // 6] if line not in QUICK]
# Lines on stderr beside the error: libraries' own warnings about what is then refused.
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
OTHERS = re.compile(r"\[(transformers|optimum_neuron)\] |.*Warning: |  (return|warnings)\b")


@pytest.fixture(scope="module")
def files(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Files:
    root = tmp_path_factory.mktemp("files")
    return Files(root, tiny_checkpoint, export_tiny(tiny_checkpoint, tmp_path_factory.mktemp("whole") / "artifact"))


@pytest.fixture
def filled(files: Files, tmp_path: Path) -> Callable[[str], str]:

    def path(match: re.Match[str]) -> str:
        return str(tmp_path / "out" / "folder" if match[1] == "out" else files.path(match[1]))

    return lambda word: re.sub(r"\{([a-z_]+(?::[^}]+)?)\}", path, word)


def foreign_options(words: tuple[str, ...], error: str) -> set[str]:
    """Return the options that an error names and its command does not have; those of an export stand after that word."""
    command = max((each for each in command_classes() if words[: len(each)] == each), key=len)
    named = OPTION.findall(re.split(r"optimum-cli|\bexport", error)[0])
    return set(named) - parser_of(command)._option_string_actions.keys()


def check(line: Line, filled: Callable[[str], str], code: object, stderr: str, folder: Path) -> None:
    assert code == line.code
    assert "Traceback" not in stderr
    lines = stderr.splitlines()
    if line.code == REFUSED:
        (error,) = [text for text in lines if not OTHERS.match(text)]
        assert error.startswith("error: ") and not foreign_options(line.words, error)
    else:
        error = lines[-1]
        assert re.match(r"(optimum-cli\b.*|Optimum CLI tool): error: ", error), stderr
    assert [words for words in map(filled, line.tells) if words not in error] == []
    assert not list(folder.iterdir()), "something was written"


@pytest.mark.parametrize("line", LINES, ids=str)
def test_a_wrong_command_line_ends_in_one_sentence(
    line: Line, filled: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(sys, "argv", ["optimum-cli", *map(filled, line.words)])
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        optimum_cli.main()
    (tmp_path / "here").rmdir()
    check(line, filled, ended.value.code, capsys.readouterr().err, tmp_path)


@pytest.mark.parametrize("line", [*QUICK, *(pytest.param(line, marks=pytest.mark.full) for line in SAMPLE)], ids=str)
def test_a_wrong_command_line_ends_a_process_alike(line: Line, filled: Callable[[str], str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "optimum.commands.optimum_cli", *map(filled, line.words)]
    options: dict[str, Any] = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL, "timeout": 300}
    variables = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, **options, cwd=tmp_path, env=variables, check=False)
    check(line, filled, done.returncode, done.stderr, tmp_path)


def test_no_command_line_stands_twice() -> None:
    assert len({str(line) for line in LINES}) == len(LINES)
    assert {line.code for line in LINES} == {REFUSED, USAGE}
