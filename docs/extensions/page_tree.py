# SPDX-License-Identifier: Apache-2.0
"""The site's navigation, found rather than written: a page that is added to docs/ stands in it, and index.md stays plain Markdown."""

from __future__ import annotations

from sphinx.application import Sphinx


# Captions and pages in the order in which they are read. Pages of docs/ that stand nowhere else are tasks.
START = ("install", "quickstart", "concepts")
TASKS = ("export", "options", "chat", "serving", "deploy", "inspect", "bench", "hub", "neuron", "device")
REFERENCE = ("reference/cli", "reference/api", "troubleshooting", "faq", "migration", "/MODELS", "/NEURON")
BACKGROUND = (
    "guarantees",
    "limits",
    "comparison",
    "results",
    "/benchmark/README",
    "/SECURITY",
    "/CHANGELOG",
    "/CONTRIBUTING",
    "/AGENTS",
    "/ARCHITECTURE",
)


def _toctree(caption: str, pages: list[str]) -> str:
    return "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", ""])


def _add_tree(app: Sphinx, docname: str, source: list[str]) -> None:
    if docname != app.config.root_doc:
        return
    found = {name.removeprefix("docs/") if name.startswith("docs/") else f"/{name}" for name in app.env.found_docs}
    found.remove("index")
    background = (*BACKGROUND, *sorted(name for name in found if name.startswith("/optimum_neuron/")))
    known = {*START, *REFERENCE, *background}
    tasks = [*TASKS, *sorted(found - known - {*TASKS})]
    parts = {"Start": START, "Tasks": tasks, "Reference": REFERENCE, "Background": background}
    for caption, pages in parts.items():
        source[0] += _toctree(caption, [page for page in pages if page in found])


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", _add_tree)
    return {"parallel_read_safe": True}
