# SPDX-License-Identifier: Apache-2.0
"""What README and docs promise: their commands parse, their make targets, files and options exist. tests/docs runs what they show."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from documents import DOCUMENTS, PAGES, README, ROOT, SHELL, all_commands, blocks, by_hand, code_spans, commands, prose
from optimum.commands import optimum_cli
from parsers import command_classes, parser_of

from optimum_neuron.targets.neuron.sdk import flags


MOST_WORDS = 700
LANGUAGES = {*SHELL, "python", "text", "json", "yaml", "{cli-reference}", "{eval-rst}"}
SOURCE_SUFFIXES = (".cpp", ".md", ".py", ".toml")
INDEX = ROOT / "docs" / "index.md"
MOST_BULLETS, MOST_WORDS_OF_A_BULLET = 3, 15
# Rooms that a reader of one model's path needs.
CORE = ("step", "runtime", "generate")


def shell_commands(program: str) -> list[list[str]]:
    calls = [call for document in DOCUMENTS for call in all_commands(document)]
    return [list(call.words[1:]) for call in calls if call.program == program]


def links(document: Path) -> set[str]:
    found = set(re.findall(r"\]\(([^)#\s]+)", prose(document)))
    return {link for link in found if not link.startswith("../../actions/")}  # pages of the host of a repository


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {word for words in shell_commands("make") for word in words}
    named |= {span.split()[1] for span in code_spans() if re.match(r"make [a-z0-9-]+", span)}
    assert named, "the README names no make command"
    assert named <= targets


def test_optimum_cli_commands_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = shell_commands("optimum-cli")
    assert {tuple(call[:2]) for call in calls} >= {("export", "neuron"), ("neuron", "generate")}
    parse(monkeypatch, calls)


def parse(monkeypatch: pytest.MonkeyPatch, calls: Iterable[Sequence[str]]) -> None:
    for words, command in command_classes().items():
        if words != ("neuron",):
            monkeypatch.setattr(command, "run", lambda self: None)
    for call in calls:
        monkeypatch.setattr(sys, "argv", ["optimum-cli", *call])
        optimum_cli.main()


@pytest.mark.parametrize("words", command_classes(), ids=" ".join)
def test_a_help_begins_with_what_the_command_does_and_has_examples_that_parse(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    parser = parser_of(words)
    assert re.match(r"[A-Z][a-z]+,? [a-z]", parser.description or "")
    calls = [call.words[1:] for call in commands(parser.epilog or "") if call.program == "optimum-cli"]
    assert [call for call in calls if call[: len(words)] == words]
    parse(monkeypatch, calls)


def test_options_in_the_text_exist() -> None:
    known = {option for words in command_classes() for option in parser_of(words)._option_string_actions}
    known |= set(re.findall(r"--[a-z][\w-]+", inspect.getsource(flags)))  # those of the Neuron compiler
    spans = {span.split()[0].partition("=")[0] for span in code_spans() if span.startswith("--")}
    assert spans <= known


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(document: Path) -> None:
    assert not [link for link in links(document) if "://" not in link and not (document.parent / link).exists()]


def test_every_page_can_be_found_from_the_readme_which_is_read_in_minutes() -> None:
    found = {README.parent / link for link in links(README)} | {INDEX.parent / link for link in links(INDEX)}
    assert set(PAGES) <= {path.resolve() for path in found}
    assert len(by_hand(README).split()) <= MOST_WORDS


@pytest.mark.parametrize("page", [README, INDEX], ids=lambda path: path.name)
def test_a_front_page_says_what_has_not_been_shown_before_any_promise(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    limit = text.find("have not run on a device")
    assert 0 < limit < min(text.index("\n- "), text.index("```"))


def test_the_promises_of_the_readme_are_few_and_short() -> None:
    shown = re.sub(r"<!--.*?-->", "", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    bullets = re.findall(r"^- (.*)$", shown.partition("\n## ")[0], re.MULTILINE)
    assert 0 < len(bullets) <= MOST_BULLETS
    assert not [bullet for bullet in bullets if len(bullet.split()) > MOST_WORDS_OF_A_BULLET]


def test_the_size_of_the_core_is_what_the_readme_says() -> None:
    said = re.search(r"has about ([\d,]+) lines of Python", README.read_text(encoding="utf-8"))
    files = [path for room in CORE for path in (ROOT / "optimum_neuron" / room).rglob("*.py")]
    lines = sum(len(path.read_text("utf-8").splitlines()) for path in files if "features" not in path.parts)
    assert said and abs(int(said[1].replace(",", "")) - lines) <= 500


def test_files_in_the_text_exist() -> None:
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name not in ("build", "dist")}
    names = {path.name for folder in ("commands", "optimum_neuron", "tests") for path in (ROOT / folder).rglob("*.*")}
    for span in code_spans():
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)*/?", span) is None:
            continue
        in_tree = "/" in span and span.partition("/")[0] in folders
        if in_tree or span.endswith(SOURCE_SUFFIXES):
            assert (ROOT / span).exists() or span in names, span


ROOM_PAGES = [ROOT / "ARCHITECTURE.md", *sorted((ROOT / "optimum_neuron").rglob("README.md"))]


def test_methods_that_the_architecture_names_exist() -> None:
    named = set(re.findall(r"`(?:[\w/.]+: )?([A-Z]\w+)\.(\w+)`", (ROOT / "ARCHITECTURE.md").read_text("utf-8")))
    trees = [ast.parse(path.read_text("utf-8")) for path in (ROOT / "optimum_neuron").rglob("*.py")]
    classes = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    made = {(each.name, child.name) for each in classes for child in each.body if isinstance(child, ast.FunctionDef)}
    assert named and named <= made, named - made


@pytest.mark.parametrize("page", ROOM_PAGES, ids=lambda path: path.parent.name)
def test_files_and_functions_that_a_map_names_exist(page: Path) -> None:
    """A path is seen from the page's folder, the package, the tests of the room, or the root."""
    room = page.parent.relative_to(ROOT)
    tests = ROOT / "tests" / room.relative_to("optimum_neuron") if room != Path() else ROOT / "tests"
    roots = (page.parent, ROOT, ROOT / "optimum_neuron", tests, ROOT / "tests")
    spans = re.findall(r"`([a-z0-9_./-]+\.(?:py|h|cpp|md))(?:: ([\w.]+))?`", page.read_text(encoding="utf-8"))
    assert spans
    for name, function in spans:
        paths = [root / name for root in roots]
        found = [path for path in paths if path.exists()] or [*page.parent.rglob(name), *(ROOT / "tests").rglob(name)]
        assert found, name
        if function:
            text = found[0].read_text(encoding="utf-8")
            assert re.search(rf"(?:def|class) {function.rpartition('.')[2]}\b", text), f"{name}: {function}"


def test_blocks_say_what_they_are() -> None:
    kinds = {(page.name, (block.language.split() or [""])[0]) for page in DOCUMENTS for block in blocks(page)}
    assert not [(name, kind) for name, kind in kinds if kind not in LANGUAGES]
