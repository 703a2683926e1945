# SPDX-License-Identifier: Apache-2.0
"""Puts the kernels into a wheel: a library for each instruction set of this kind of CPU, for every version of Python.

Without a C++ compiler, or with OPTIMUM_NEURON_PURE_WHEEL=1, a wheel has their sources alone, and runs anywhere.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build


ROOT = Path(__file__).resolve().parent
PACKAGE = "optimum_neuron.kernels"


@cache
def own_module(name: str) -> Any:
    """Import a module of PACKAGE, without what the packages around it import: torch, which a build does not have."""
    parts = PACKAGE.split(".")
    for count in range(1, len(parts) + 1):
        package = ModuleType(".".join(parts[:count]))
        package.__path__ = [str(ROOT.joinpath(*parts[:count]))]
        sys.modules.setdefault(package.__name__, package)
    return importlib.import_module(f"{PACKAGE}.{name}")


@cache
def has_kernels() -> bool:
    """Whether this wheel gets libraries."""
    native_build = own_module("host.native_build")
    pure = os.environ.get("OPTIMUM_NEURON_PURE_WHEEL", "") not in ("", "0")
    return not pure and sys.platform in native_build.PORTABLE and native_build.find_compiler() is not None


class PackageWithKernels(Distribution):
    """Says what decides a wheel's tag."""

    def has_ext_modules(self) -> bool:
        return has_kernels()


class BuildKernels(Command):
    """Builds the libraries. An editable install goes without: its sources change."""

    editable_mode = False
    user_options = []  # noqa: RUF012 - setuptools' own type

    def initialize_options(self) -> None:
        self.build_lib: Any = None  # from here on a path

    def finalize_options(self) -> None:
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def _outputs(self) -> dict[Path, Any]:
        folder = Path(self.build_lib, *PACKAGE.split("."), "prebuilt")
        names = own_module("host.native_build").name_prebuilt
        return {folder / names(each): each for each in own_module("host.instruction_sets").list_platform_sets()}

    def run(self) -> None:
        if self.editable_mode:
            return
        native_build = own_module("host.native_build")
        outputs = self._outputs()
        for folder in {path.parent for path in outputs}:
            folder.mkdir(parents=True, exist_ok=True)
            for other in set(folder.iterdir()) - outputs.keys():  # of other sources, or unfinished
                shutil.rmtree(other) if other.is_dir() else other.unlink()
        for path, instruction_set in outputs.items():
            if path.exists():  # an earlier build has left it, and its name is a digest of its sources
                continue
            unfinished = path.with_suffix(".unfinished")
            # pip shows this with -v alone.
            done = partial(print, "compiled for", instruction_set.name, flush=True)
            native_build.build(unfinished, instruction_set, native_build.PORTABLE[sys.platform], done)
            unfinished.replace(path)

    def get_outputs(self) -> list[str]:
        return [] if self.editable_mode else [str(path) for path in self._outputs()]

    def get_source_files(self) -> list[str]:
        return []  # build_py names them


class BuildAll(build):
    """All that a wheel holds."""

    sub_commands = [*build.sub_commands, ("build_kernels", lambda self: self.distribution.has_ext_modules())]  # noqa: RUF012


class PlatformWheel(bdist_wheel):
    """A wheel for one platform, and for every Python: nothing in it is compiled against one."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


setup(
    distclass=PackageWithKernels,
    cmdclass={"bdist_wheel": PlatformWheel, "build": BuildAll, "build_kernels": BuildKernels},
)
