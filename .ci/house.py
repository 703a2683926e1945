# SPDX-License-Identifier: Apache-2.0
"""Measures the sizes of the repository, and fails where one is above its budget in budgets.cfg.

`make lint` runs it. Who needs more room changes the budget in the same commit, and says why there.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
BUDGETS = Path(__file__).with_name("budgets.cfg")
SOURCES = (".py", ".cpp", ".h")


def sources(folder: str) -> Iterator[Path]:
    """Yield the files of Python and C++ in a folder and those below it."""
    return (path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in SOURCES)


class Budgets(ConfigParser):
    """Names as they stand in the file, in capitals too."""

    def optionxform(self, optionstr: str) -> str:
        return optionstr


def line_count(folder: str) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in sources(folder))


def word_count(document: str) -> int:
    return len((ROOT / document).read_text(encoding="utf-8").split())


def name_figures() -> dict[str, int]:
    """Return figures of the package's folders and names."""
    trees = {
        path: ast.parse(path.read_text(encoding="utf-8")) for path in sources("optimum_neuron") if path.suffix == ".py"
    }
    functions = [
        node.name.strip("_")
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("__")
    ]
    classes = Counter(
        name
        for tree in trees.values()
        for name in {node.name.strip("_") for node in tree.body if isinstance(node, ast.ClassDef)}
    )
    return {
        "python files in a folder": max(Counter(path.parent for path in trees).values()),
        "functions of one name": max(Counter(functions).values()),
        "percent of functions with a name of one word": round(
            100 * sum("_" not in name for name in functions) / len(functions)
        ),
        "class names in several files": sum(files > 1 for files in classes.values()),
    }


def main() -> int:
    """Print each figure above its budget; return the exit code."""
    budgets = Budgets(delimiters=("=",))
    with BUDGETS.open(encoding="utf-8") as file:
        budgets.read_file(file)
    found = {
        "lines": {folder: line_count(folder) for folder in budgets["lines"]},
        "words": {document: word_count(document) for document in budgets["words"]},
        "names": name_figures(),
    }
    over = [
        f"{section}, {name}: {value:,}, and its budget is {budgets.getint(section, name):,}"
        for section, figures in found.items()
        for name, value in figures.items()
        if value > budgets.getint(section, name)
    ]
    for line in over:
        sys.stdout.write(f"{line}; make it smaller, or change {BUDGETS.name} on purpose\n")
    return bool(over)


if __name__ == "__main__":
    sys.exit(main())
