# SPDX-License-Identifier: Apache-2.0
"""Every message that docs/troubleshooting.md explains is one that the sources can tell."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest
from documents import ROOT


PAGE = ROOT / "docs" / "troubleshooting.md"
MESSAGES = re.findall(r"^### `(.+)`$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
FEWEST = 25
VALUE = "…"


def template(node: ast.AST) -> str | None:
    """A string of the sources, its values left out."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else VALUE for part in node.values)
    return None


@cache
def told() -> tuple[str, ...]:
    files = [*(ROOT / "optimum_neuron").rglob("*.py"), *(ROOT / "commands").glob("*.py")]
    found = (template(node) for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    return tuple({text for text in found if text is not None})


def test_the_commonest_messages_are_explained_once_each() -> None:
    assert len(MESSAGES) >= FEWEST
    assert len(set(MESSAGES)) == len(MESSAGES)
    headings = re.findall(r"^### .*", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(headings) == len(MESSAGES), "a heading below a section is a message"


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_that_is_explained_can_be_told(message: str) -> None:
    assert any(message in text for text in told())
