# SPDX-License-Identifier: Apache-2.0
"""The documentation site (`make docs`). Its sources are the Markdown files of the repository, which are read on their own as well."""

from __future__ import annotations

import sys
from pathlib import Path


HERE = Path(__file__).parent
# The package next to these pages, not one that is installed; and the extensions.
sys.path[:0] = [str(HERE.parent), str(HERE / "extensions")]

from optimum_neuron import __version__  # noqa: E402


project = "optimum-neuron-runtime"
author = "the authors of optimum-neuron-runtime"
version = release = __version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "cli_reference",
    "own_properties",
    "page_tree",
]

# Pages link to files next to docs/, so the sources are the repository's root, and of it only these pages.
root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "benchmark/README.md",
    "examples/README.md",
    "optimum_neuron/**/README.md",
    *(
        f"{name}.md"
        for name in ("AGENTS", "ARCHITECTURE", "CHANGELOG", "CONTRIBUTING", "MODELS", "NEURON", "SECURITY")
    ),
]
exclude_patterns = [
    ".venv*",
    ".git",
    ".*_cache",
    ".hypothesis",
    "build",
    "dist",
    "*.egg-info",
    "tests",
]
nitpicky = True
# Names in signatures without a page: of other packages, as builds need no network, and of parts that are not public.
nitpick_ignore_regex = [
    (
        "py:.*",
        r"(torch|transformers|huggingface_hub|numpy|np|collections|pathlib|argparse|datetime|concurrent|os|types|typing|asyncio|queue)\..*",
    ),
    (
        "py:.*",
        r"optimum_neuron\.(runtime\.(runner\.GraphRunner|process\.OwnProcess)|artifact\.artifact\.Artifact|targets\.(Executable|CompileJob)"
        r"|engine\.stream\.Mailbox|engine\.continuous_batching\.requests\.RequestFactory)",
    ),
    ("py:(exc|class)", "[A-Z][A-Za-z]+"),  # ours, without their modules
]

myst_heading_anchors = 4
# Unless a block says so, it is no code: commands' answers and file trees stand in such.
highlight_language = "text"
smartquotes = False  # two dashes begin an option
default_role = "code"  # docstrings write code in single backquotes
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "separated"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"optimum-neuron-runtime {__version__}"
templates_path = ["templates"]
html_additional_pages = {"index": "front.html"}
html_copy_source = html_show_sourcelink = html_show_sphinx = False
