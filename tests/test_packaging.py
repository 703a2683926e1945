# SPDX-License-Identifier: Apache-2.0
"""The wheel: complete, light to import, and enough for optimum-cli in an environment that knows no source tree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it where Python does not

from optimum_neuron import __version__
from optimum_neuron.config import NeuronConfig


ROOT = Path(__file__).resolve().parents[1]
SOURCES = ["pyproject.toml", "README.md", "LICENSE", "commands", "optimum_neuron"]


def run(*command: str | Path, cwd: Path) -> str:
    """Runs a program without this process's import path; returns its stdout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built from a copy: a `build` folder in the source tree would bring deleted files back."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        source, copy = ROOT / name, folder / "source" / name
        copy.parent.mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(source, copy)
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        folder,
        folder / "source",
        cwd=folder,
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel, whose dependencies are those of the running environment.

    Import hooks of editable installs stay out: a path that a .pth file adds is not searched for further .pth files.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "-q", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    outside = [path for path in sys.path if path.endswith("site-packages")] or [sysconfig.get_path("purelib")]
    (site_packages / "dependencies.pth").write_text("\n".join(outside) + "\n", encoding="utf-8")
    return python


def test_every_subpackage_is_listed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = set(project["tool"]["setuptools"]["packages"])
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "optimum_neuron").rglob("__init__.py")}
    assert listed == found | {"optimum.commands.register"}


def test_commands_are_no_package() -> None:
    assert not (ROOT / "commands" / "__init__.py").exists(), "optimum-cli warns of it"


def test_importing_the_package_imports_no_torch() -> None:
    program = "import sys, optimum_neuron, optimum_neuron.cli, optimum_neuron.artifacts.artifact; print('torch' in sys.modules)"
    assert run(sys.executable, "-c", program, cwd=ROOT) == "False\n"


def test_wheel_holds_every_source_file(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "optimum_neuron").rglob("*.py")}
    native = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "optimum_neuron").rglob("*")
        if path.suffix in (".cpp", ".h")
    }
    commands = {f"optimum/commands/register/{path.name}" for path in (ROOT / "commands").glob("*.py")}
    assert native
    assert package | native | commands == {name for name in names if ".dist-info/" not in name}


def test_wheel_states_version_and_license(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith("dist-info/METADATA"))
    lines = archive.read(metadata).decode().splitlines()
    assert {"Name: optimum-neuron-runtime", f"Version: {__version__}", "License-Expression: Apache-2.0"} <= set(lines)


def test_command_line_runs_from_the_wheel(python: Path) -> None:
    environment = python.parents[1]
    where = run(python, "-c", "import optimum_neuron; print(optimum_neuron.__file__)", cwd=environment)
    assert Path(where.strip()).is_relative_to(environment)
    program = "from optimum.commands.optimum_cli import main; main()"
    text = run(python, "-c", program, "export", "neuron", "--help", cwd=environment)
    for name in NeuronConfig.option_names():
        assert re.search(rf"--(no-)?{name.replace('_', '-')}\b", text), name
    assert "inspect" in run(python, "-c", program, "neuron", cwd=environment)
