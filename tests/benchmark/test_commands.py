# SPDX-License-Identifier: Apache-2.0
"""The benchmarks as commands: each explains itself, takes what the documents tell to type, and refuses what is no number."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from argparse import ArgumentTypeError
from pathlib import Path

import pytest

import benchmark
from benchmark import options


ROOT = Path(__file__).resolve().parents[2]
NAMED = sorted(set(re.findall(r"python -m (benchmark[\w.]+)", benchmark.__doc__ or "")))
DOCUMENTS = [
    "Makefile",
    "README.md",
    "docs/results.md",
    "docs/bench.md",
    "docs/neuron.md",
    "AGENTS.md",
    "benchmark/README.md",
]


def help_of(module: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    command = importlib.import_module(module)
    if hasattr(command, "__path__"):
        command = importlib.import_module(f"{module}.__main__")
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_the_package_names_every_command() -> None:
    folder = ROOT / "benchmark"
    files = [path for path in folder.rglob("*.py") if '__name__ == "__main__"' in path.read_text(encoding="utf-8")]
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__") for path in files}
    started = {module for module in modules if module.startswith("benchmark.peers.workers.")}
    assert modules == {*NAMED, *started}  # which others start


def test_no_folder_imports_another() -> None:
    folders = {path.parent.name for path in (ROOT / "benchmark").glob("*/__init__.py")}
    for path in (ROOT / "benchmark").glob("*/*.py"):
        text = path.read_text(encoding="utf-8")
        assert not set(re.findall(r"from (?:\.\.|benchmark\.)(\w+)", text)) & folders, path


@pytest.mark.parametrize("module", NAMED)
def test_help_has_examples_and_what_the_documents_tell_to_type(
    module: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = help_of(module, capsys, monkeypatch)
    assert f"usage: python -m {module} " in shown and "examples:\n" in shown
    known = set(re.findall(r"--[a-z][a-z0-9-]*", shown.partition("examples:")[0]))
    typed = [shown, *((ROOT / name).read_text(encoding="utf-8") for name in DOCUMENTS)]
    commands = [line for text in typed for line in re.findall(rf"-m {re.escape(module)}(?: (.*))?$", text, re.M)]
    given = {word for line in commands for word in shlex.split(line.partition("`")[0], comments=True)}
    assert {word for word in given if word.startswith("--")} <= known


def test_documents_name_modules_that_exist() -> None:
    for name in [*DOCUMENTS, "ARCHITECTURE.md"]:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert set(re.findall(r"-m (benchmark[\w.]*\w)", text)) <= set(NAMED), name
        for path in re.findall(r"(?<!build/)(?<!tests/)benchmark/[\w./]*\.(?:py|png|md)", text):
            assert (ROOT / path).is_file(), f"{name}: {path}"


def test_rates_are_above_0_and_counts_are_whole_numbers_of_at_least_so_many() -> None:
    assert options.at_least(3)("3") == 3
    for text in ("0", "-1", "inf", "nan", "many"):
        with pytest.raises(ArgumentTypeError, match="is not a number above 0"):
            options.above_zero(text)
    for text in ("-1", "1.0", "1e3", "", " 1", "2"):
        with pytest.raises(ArgumentTypeError, match="is not a whole number of at least 3"):
            options.at_least(3)(text)
