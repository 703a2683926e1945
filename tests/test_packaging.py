# SPDX-License-Identifier: Apache-2.0
"""The wheel: complete, light to import, and enough for optimum-cli and for kernels in an environment that knows no source tree."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from filelock import FileLock


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it where Python does not

from optimum_neuron import __version__
from optimum_neuron.artifact.user_cache import CACHE_VARIABLE
from optimum_neuron.config import NeuronConfig
from optimum_neuron.kernels.host import native_build
from optimum_neuron.kernels.host.instruction_sets import list_instruction_sets, list_platform_sets
from optimum_neuron.targets.cpu.native_library import fetch_library


ROOT = Path(__file__).resolve().parents[1]
PROJECT = ["pyproject.toml", "setup.py", "README.md", "LICENSE", "commands", "optimum_neuron"]
LIBRARIES = {f"optimum_neuron/kernels/prebuilt/{native_build.name_prebuilt(each)}" for each in list_platform_sets()}
# Stands for the compiler of a wheel: it notes what it is asked for, and links to libraries of the compile cache.
COMPILER = """#!/bin/sh
echo "$*" >> {log}
for target; do :; done
case "$*" in
{libraries}
*) : > "$target" ;;
esac
"""
BUILD_EDITABLE = "from setuptools.build_meta import build_editable; build_editable('.')"


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """Runs a program without this process's import path, `variables` in its environment; returns its stdout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def copy_project(folder: Path) -> Path:
    """What a wheel is made of: a `build` folder in the source tree would bring deleted files back."""
    for name in PROJECT:
        source, copy = ROOT / name, folder / "source" / name
        copy.parent.mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(source, copy)
    return folder / "source"


def build_wheel(folder: Path, **variables: str) -> Path:
    source = folder / "source" if (folder / "source").exists() else copy_project(folder)
    command = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, source)
    run(*command, cwd=folder, **variables)
    (wheel,) = folder.glob("*.whl")
    return wheel


def write_compiler(folder: Path, script: str = "#!/bin/sh\nexit 1\n") -> Path:
    """Write one that fails, or another one."""
    path = folder / "c++"
    path.write_text(script, encoding="utf-8")
    path.chmod(0o755)
    return path


def write_stand_in(folder: Path) -> Path:
    """Write a compiler that links to the kernels of this run: for the best set to its own, for others to those of the least set."""
    found: dict[str, Path] = {}
    for chosen in {each.name: each for each in (list_instruction_sets()[0], list_instruction_sets()[-1])}.values():
        (folder / chosen.name).mkdir()
        with FileLock(f"{os.environ[CACHE_VARIABLE]}-{chosen.name}.lock"):
            found[chosen.name] = fetch_library(folder / chosen.name / "kernels.so", chosen)
    least = list(found.values())[-1]
    cases = [
        f'*"-pthread {" ".join((*each.flags, "-I"))}"*-shared*) cp {found.get(each.name, least)} "$target" ;;'
        for each in list_platform_sets()
    ]
    return write_compiler(folder, COMPILER.format(log=folder / "log", libraries="\n".join(cases)))


@pytest.fixture(scope="session")
def wheel(_compile_cache: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a wheel with kernels, one for all processes of a run."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "wheel-with-kernels"
    with FileLock(f"{shared}.lock"):
        if not shared.exists():
            folder = tmp_path_factory.mktemp("wheel")
            built = build_wheel(folder, CXX=str(write_stand_in(folder)))
            asked = (folder / "log").read_text(encoding="utf-8").splitlines()
            sources = [source.name for source in native_build.list_sources()]
            for each in list_platform_sets():
                own = [line for line in asked if f"-pthread {' '.join((*each.flags, '-I'))}" in line]
                compiled = [Path(line.split(" -c ")[1].split(" -o ")[0]).name for line in own if " -c " in line]
                assert sorted(compiled) == sorted(sources)
                (link,) = (line.split() for line in own if "-shared" in line)
                assert {*native_build.PORTABLE[sys.platform]} <= {*link}
            shared.mkdir()
            shutil.copy(built, shared)
    (wheel,) = shared.glob("*.whl")
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


def test_every_subpackage_is_listed_and_commands_are_none() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = set(project["tool"]["setuptools"]["packages"])
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "optimum_neuron").rglob("__init__.py")}
    assert listed == found | {"optimum.commands.register"}
    assert not (ROOT / "commands" / "__init__.py").exists(), "optimum-cli warns of it"


def test_wheel_holds_every_source_file_and_a_library_for_every_instruction_set(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    suffixes = {".py", ".cpp", ".h", ".html", ".css", ".md", ".typed"}
    files = [path.relative_to(ROOT) for path in (ROOT / "optimum_neuron").rglob("*") if path.suffix in suffixes]
    commands = {f"optimum/commands/register/{path.name}" for path in (ROOT / "commands").glob("*.py")}
    assert {path.suffix for path in files} == suffixes
    shown = {name for name in names if ".dist-info/" not in name}
    assert {path.as_posix() for path in files} | commands | LIBRARIES == shown


def test_wheel_is_for_one_platform_and_every_python_and_states_version_and_license(wheel: Path) -> None:
    assert re.search(rf"-py3-none-(linux|macosx)\w*_{platform.machine()}\.whl$", wheel.name)
    archive = zipfile.ZipFile(wheel)
    texts = {Path(name).name: archive.read(name).decode() for name in archive.namelist() if ".dist-info/" in name}
    assert "Root-Is-Purelib: false" in texts["WHEEL"].splitlines()
    stated = {"Name: optimum-neuron-runtime", f"Version: {__version__}", "License-Expression: Apache-2.0"}
    assert stated <= set(texts["METADATA"].splitlines())


PORTABLE_STUB = """
#include <iostream>
#include <stdexcept>
#include <thread>
extern "C" long step_run() {
    std::thread([] { std::cerr << "x"; }).join();
    throw std::runtime_error("y");
}
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of ELF files")
def test_libraries_bring_what_is_absent(_compile_cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flags of a wheel link in all but C's own libraries, and kernels need nothing else."""
    least = list_instruction_sets()[-1]
    kernels = fetch_library(tmp_path / "kernels.so", least).read_bytes()
    assert {*re.findall(rb"lib[\w+-]+\.so", kernels)} <= {b"libstdc++.so", b"libgcc_s.so", b"libm.so", b"libc.so"}
    (tmp_path / "stub.cpp").write_text(PORTABLE_STUB, encoding="ascii")
    monkeypatch.setattr(native_build, "list_sources", lambda: [tmp_path / "stub.cpp"])
    native_build.build(tmp_path / "stub.so", least, native_build.PORTABLE["linux"])
    data = (tmp_path / "stub.so").read_bytes()
    assert b"step_run" in data and b"libc.so" in data
    assert not [word for word in (b"libstdc++.so", b"libgcc_s.so", b"GLIBCXX", b".symtab") if word in data]


@pytest.mark.parametrize("variables", [{"CXX": "no-such-compiler"}, {"OPTIMUM_NEURON_PURE_WHEEL": "1"}], ids=str)
def test_wheel_without_libraries_runs_anywhere(variables: dict[str, str], tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path, **variables)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]


def test_libraries_that_a_build_has_left_in_the_clone_are_not_built_again(wheel: Path, tmp_path: Path) -> None:
    source, compiler = copy_project(tmp_path), write_compiler(tmp_path)
    left = source / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    zipfile.ZipFile(wheel).extractall(left, LIBRARIES)
    (left / next(iter(LIBRARIES))).with_name("of-other-sources.so").touch()
    names = zipfile.ZipFile(build_wheel(tmp_path, CXX=str(compiler))).namelist()
    assert {name for name in names if name.endswith(".so")} == LIBRARIES


def test_editable_install_builds_no_libraries(tmp_path: Path) -> None:
    source, compiler = copy_project(tmp_path), write_compiler(tmp_path)
    run(sys.executable, "-c", BUILD_EDITABLE, cwd=source, CXX=str(compiler))
    assert list(source.glob("*.whl")) and not list(tmp_path.rglob("*.so"))


def test_installed_wheel_needs_no_compiler_and_has_the_command_line(python: Path) -> None:
    environment = python.parents[1]
    run(python, ROOT / "tests" / "wheel_check.py", cwd=environment, PATH=str(python.parent))
    where = run(python, "-c", "import optimum_neuron; print(optimum_neuron.__file__)", cwd=environment)
    assert Path(where.strip()).is_relative_to(environment)
    program = "from optimum.commands.optimum_cli import main; main()"
    text = run(python, "-c", program, "export", "neuron", "--help", cwd=environment)
    for name in NeuronConfig.option_names():
        assert re.search(rf"--(no-)?{name.replace('_', '-')}\b", text), name
    assert "inspect" in run(python, "-c", program, "neuron", cwd=environment)
