# SPDX-License-Identifier: Apache-2.0
"""The rooms of the package: who may import whom. ARCHITECTURE.md has the same order in words."""

from __future__ import annotations

import ast
import graphlib
import re
from functools import cache
from pathlib import Path

import pytest

import optimum_neuron


PACKAGE = Path(optimum_neuron.__file__).parent
# From the bottom up: a room may import those before it, wherever in a file the import stands.
ROOMS = (
    "kernels", "version", "errors", "arrays", "config", "progress", "step", "core", "parity", "checkpoints", "artifact", "cli", "targets",
    "runtime", "engine", "text", "export", "hub", "generate", "vllm", "tools", "__init__",
)  # fmt: skip


def _modules() -> dict[str, Path]:
    names = {path.relative_to(PACKAGE.parent).with_suffix("").as_posix(): path for path in PACKAGE.rglob("*.py")}
    return {name.replace("/", ".").removesuffix(".__init__"): path for name, path in names.items()}


@cache
def _imports() -> dict[str, set[str]]:
    modules = _modules()
    found: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom):
                continue
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            source = f"{base}.{node.module or ''}".strip(".")
            members = (f"{source}.{alias.name}" for alias in node.names)
            found[name] |= {member if member in modules else source for member in members} & modules.keys()
    return found


def _room(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def test_imports_go_one_way_between_rooms() -> None:
    upwards = [
        f"{name} imports {other}"
        for name, others in _imports().items()
        for other in others
        if ROOMS.index(_room(other)) > ROOMS.index(_room(name))
    ]
    assert upwards == []


def test_only_targets_and_tools_know_the_kernels() -> None:
    found = {_room(name) for name, others in _imports().items() if "kernels" in map(_room, others)}
    assert found <= {"kernels", "targets", "tools"}


@pytest.mark.parametrize("depth", [2, 3, 4, 9], ids=lambda depth: f"depth-{depth}")
def test_no_room_or_file_imports_itself_in_a_circle(depth: int) -> None:
    """`depth` parts of a name make a room: optimum_neuron.targets, optimum_neuron.targets.neuron, and so on to files."""

    def part(name: str) -> str:
        return ".".join(name.split(".")[:depth])

    graph: dict[str, set[str]] = {}
    for name, others in _imports().items():
        own = part(name)
        # A package's own __init__ names what is in it.
        parts = set(map(part, others))
        graph.setdefault(own, set()).update(x for x in parts if not own.startswith(x) and not x.startswith(own))
    graphlib.TopologicalSorter(graph).prepare()


def test_the_package_imports_nothing_that_the_wheel_lacks() -> None:
    lacking = re.compile(r"^ *(?:from|import) (?:benchmark|tests|conftest|helpers)\b", re.MULTILINE)
    for path in (*_modules().values(), *(PACKAGE.parent / "commands").glob("*.py")):
        assert not lacking.search(path.read_text(encoding="utf-8")), path
