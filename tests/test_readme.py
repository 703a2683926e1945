# SPDX-License-Identifier: Apache-2.0
"""What README and docs promise: their commands parse, their make targets and files exist, their Python compiles."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from functools import cache
from pathlib import Path

import pytest
from optimum.commands import optimum_cli


ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
DOCUMENTS = (README, *sorted((ROOT / "docs").glob("*.md")))
MOST_WORDS = 900
SHELL = ("bash", "console", "sh", "shell")
SOURCE_SUFFIXES = (".cpp", ".md", ".py", ".toml")
SHELL_OPERATORS = {"&&", "||", "|", ";", "<", ">", ">>", "2>", "&"}


@cache
def code_blocks() -> list[tuple[str, str]]:
    """Language and text of each fenced block."""
    text = "\n".join(document.read_text(encoding="utf-8") for document in DOCUMENTS)
    return re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@cache
def prose(document: Path) -> str:
    return re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def shell_commands(program: str) -> list[list[str]]:
    """The arguments of each call of a program in the shell blocks."""
    text = "\n".join(text for language, text in code_blocks() if language in SHELL).replace("\\\n", " ")
    calls = []
    for line in text.splitlines():
        words = shlex.split(line.strip().removeprefix("$ "), comments=True)
        while words:
            stop = next((index for index, word in enumerate(words) if word in SHELL_OPERATORS), len(words))
            command = [word for word in words[:stop] if not re.fullmatch(r"[A-Z_]+=.*", word)]
            if command and Path(command[0]).name == program:
                calls.append(command[1:])
            words = words[stop + 1 :]
    return calls


def code_spans() -> list[str]:
    return [span for each in DOCUMENTS for span in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose(each))]


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {word for words in shell_commands("make") for word in words}
    named |= {span.split()[1] for span in code_spans() if re.match(r"make [a-z0-9-]+", span)}
    assert named, "the README names no make command"
    assert named <= targets


def test_optimum_cli_commands_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = shell_commands("optimum-cli")
    assert {tuple(call[:2]) for call in calls} >= {("export", "neuron"), ("neuron", "generate")}
    commands = importlib.import_module("optimum.commands.register.neuron")
    export = importlib.import_module("optimum.commands.register.export_neuron")
    neuron = [subcommand.subcommand_class for subcommand in commands.NeuronCommand.SUBCOMMANDS]
    nested = [each.subcommand_class for command in neuron for each in command.SUBCOMMANDS]
    for command in (export.NeuronExportCommand, *neuron, *nested):
        monkeypatch.setattr(command, "run", lambda self: None)
    for call in calls:
        monkeypatch.setattr(sys, "argv", ["optimum-cli", *call])
        optimum_cli.main()


def test_options_in_the_text_exist(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for command in (
        ["export", "neuron"],
        *(
            ["neuron", name]
            for name in ("bench", "card", "chat", "generate", "inspect", "lint", "push", "serve", "tune")
        ),
    ):
        monkeypatch.setattr(sys, "argv", ["optimum-cli", *command, "--help"])
        with pytest.raises(SystemExit):
            optimum_cli.main()
    known = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    named = {span.split()[0].partition("=")[0] for span in code_spans() if span.startswith("--")}
    assert named <= known


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(document: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", prose(document))
    assert not [link for link in links if "://" not in link and not (document.parent / link).exists()]


def test_every_page_is_linked_from_the_readme_which_is_read_in_minutes() -> None:
    links = set(re.findall(r"\]\(([^)#\s]+)", prose(README)))
    assert {f"docs/{page.name}" for page in DOCUMENTS[1:]} <= links
    assert len(README.read_text(encoding="utf-8").split()) <= MOST_WORDS


def test_files_in_the_text_exist() -> None:
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name not in ("build", "dist")}
    names = {path.name for folder in ("commands", "optimum_neuron", "tests") for path in (ROOT / folder).rglob("*.*")}
    for span in code_spans():
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)*/?", span) is None:
            continue
        in_tree = "/" in span and span.partition("/")[0] in folders
        if in_tree or span.endswith(SOURCE_SUFFIXES):
            assert (ROOT / span).exists() or span in names, span


def test_python_blocks_compile() -> None:
    for language, text in code_blocks():
        if language in ("py", "python"):
            compile(text, "README.md", "exec")
