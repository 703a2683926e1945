# SPDX-License-Identifier: Apache-2.0
"""Docstrings of properties as they are: napoleon takes what stands before a colon in their first line for a type."""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx


_kept: dict[str, list[str]] = {}


def _keep(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    if what == "property":
        _kept[name] = lines[:]


def _restore(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    if what == "property":
        lines[:] = _kept.pop(name)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", _keep, priority=400)  # before napoleon, which is at 500
    app.connect("autodoc-process-docstring", _restore, priority=600)
    return {"parallel_read_safe": True}
