# SPDX-License-Identifier: Apache-2.0
"""The documents that users read, as their blocks of code and the text between them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path


ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = tuple(sorted((ROOT / "docs").rglob("*.md")))
DOCUMENTS = (README, *PAGES, ROOT / "NEURON.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md")
SHELL = ("bash", "console", "sh", "shell")
SHELL_OPERATORS = {"&&", "||", "|", ";", "&"}
REDIRECTIONS = {"<", ">", ">>", "2>"}


@dataclass(frozen=True)
class Block:
    """A fenced block: what stands behind its fence, and its text."""

    language: str
    text: str


@dataclass(frozen=True)
class Command:
    """A program's call in a block of shell, and the variables that stand before it."""

    words: tuple[str, ...]
    variables: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join((*self.variables, *self.words))

    @property
    def program(self) -> str:
        return Path(self.words[0]).name


@cache
def blocks(document: Path) -> tuple[Block, ...]:
    found = re.findall(r"^```([^\n]*)\n(.*?)^```", document.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return tuple(Block(language.strip(), text) for language, text in found)


@cache
def prose(document: Path) -> str:
    return re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def by_hand(document: Path) -> str:
    """The text without what `python -m benchmark.publish` writes."""
    return re.sub(r"<!-- results .*?<!-- end -->", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)


def commands(text: str) -> Iterator[Command]:
    """Every call of a program in the lines of a shell."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line.strip().removeprefix("$ "), comments=True)
        while words:
            stop = next((index for index, word in enumerate(words) if word in SHELL_OPERATORS), len(words))
            pairs = zip(["", *words], words[:stop], strict=False)  # each with the one before
            call = [word for before, word in pairs if not {before, word} & REDIRECTIONS]
            variables = tuple(takewhile(re.compile(r"[A-Z_]+=.*").fullmatch, call))
            if len(variables) < len(call):
                yield Command(tuple(call[len(variables) :]), variables)
            words = words[stop + 1 :]


def all_commands(document: Path) -> Iterator[Command]:
    for block in blocks(document):
        if block.language in SHELL:
            yield from commands(block.text)


def code_spans() -> list[str]:
    """Code between the text; of migration.md's tables not what another package has, the first column."""
    spans = []
    for document in DOCUMENTS:
        text = prose(document)
        if document.name == "migration.md":
            text = re.sub(r"^\|[^|]*\|", "", text, flags=re.MULTILINE)
        spans += re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)
    return spans
