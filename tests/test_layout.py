# SPDX-License-Identifier: Apache-2.0
"""The rooms of the package: who may import whom. ARCHITECTURE.md has the same order in words."""

from __future__ import annotations

import ast
import graphlib
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


def _imports(modules: dict[str, Path]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom):
                continue
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            members = (f"{source}.{alias.name}" for alias in node.names)
            found[name] |= {member if member in modules else source for member in members} & modules.keys()
    return found


def _room(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def test_imports_go_one_way_between_rooms() -> None:
    upwards = [
        f"{name} imports {other}"
        for name, others in _imports(_modules()).items()
        for other in others
        if ROOMS.index(_room(other)) > ROOMS.index(_room(name))
    ]
    assert upwards == []


def test_only_targets_and_tools_know_the_kernels() -> None:
    found = {_room(name) for name, others in _imports(_modules()).items() if "kernels" in map(_room, others)}
    assert found <= {"kernels", "targets", "tools"}


@pytest.mark.parametrize("depth", [2, 3, 4, 9], ids=lambda depth: f"depth-{depth}")
def test_no_room_or_file_imports_itself_in_a_circle(depth: int) -> None:
    """`depth` parts of a name make a room: optimum_neuron.targets, optimum_neuron.targets.neuron, and so on to files."""
    modules = _modules()

    def part(name: str) -> str:
        return ".".join(name.split(".")[:depth])

    graph: dict[str, set[str]] = {}
    for name, others in _imports(modules).items():
        own = part(name)
        # A package's own __init__ names what is in it.
        graph.setdefault(own, set()).update(
            part(other) for other in others if not own.startswith(part(other)) and not part(other).startswith(own)
        )
    graphlib.TopologicalSorter(graph).prepare()


def test_the_package_imports_nothing_that_the_wheel_lacks() -> None:
    lacking = {"benchmark", "tests", "conftest", "helpers"}
    files = [*_modules().values(), *(PACKAGE.parent / "commands").glob("*.py")]
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.append(node.module)
            assert not {name.partition(".")[0] for name in names} & lacking, path
