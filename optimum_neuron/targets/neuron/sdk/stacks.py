# SPDX-License-Identifier: Apache-2.0
"""Versions that work together: the Python, torch and targets of each runtime, and what lowering needs. NEURON.md shows the same.

A rank's process has an interpreter of its own, so its torch need not be this package's, nor vLLM's.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version

from ....config import NEURON_TARGETS
from ..rank.packages import NEURONX_DISTRIBUTED, NRTPY, TORCH_NEURONX, Package
from .flags import version_numbers


@dataclass(frozen=True)
class Versions:
    """Versions from one to another, both with all that begin like them: 2.10 to 2.12 has 2.12.1."""

    least: str
    most: str

    def __contains__(self, version: object) -> bool:
        least, most, numbers = (version_numbers(str(each)) for each in (self.least, self.most, version))
        return least <= numbers and numbers[: len(most)] <= most

    def __str__(self) -> str:
        return self.least if self.least == self.most else f"{self.least} to {self.most}"


@dataclass(frozen=True)
class Stack:
    """A runtime, and the versions that it needs; `torch` is None where it needs none.

    `sdk` are releases of the Neuron SDK that have it, as far as their documents were read.
    """

    runtime: str
    targets: tuple[str, ...]
    packages: tuple[Package, ...]
    python: Versions
    torch: Versions | None
    sdk: Versions


NRT, NXD = NRTPY.distribution, NEURONX_DISTRIBUTED.distribution
# The preferred one first. Sources: neuron-runtime/nrtpy/index.rst; announce-maintenance-pytorch-xla-inference.rst and
# announcement-python-3-9-eol.rst.
STACKS = (
    Stack(NRT, NEURON_TARGETS, (NRTPY,), Versions("3.11", "3.14"), None, Versions("2.32", "2.32")),
    Stack(
        NXD, ("inf2", "trn1", "trn2"), (TORCH_NEURONX, NEURONX_DISTRIBUTED), Versions("3.10", "3.13"), Versions("2.9", "2.9"),
        Versions("2.29", "2.31"),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class InstalledRuntimes:
    """The packages of an interpreter: its Python, its torch, if any, and by distribution why a package cannot be used, or None."""

    python: str
    torch: str | None
    problems: Mapping[str, str | None]


def choose_runtime(target: str, found: InstalledRuntimes, where: str) -> str:
    """Return the first runtime for a target that an interpreter, `where`, has, with versions that work together.

    Raise RuntimeError where it has none; the message says what each lacks.
    """
    problems = []
    for stack in STACKS:
        if target in stack.targets:
            problem = next(filter(None, (found.problems[each.distribution] for each in stack.packages)), None)
            if problem is None and found.python not in stack.python:
                problem = f"{stack.runtime} needs Python {stack.python}, and this is {found.python}"
            if problem is None and stack.torch is not None and (found.torch or "") not in stack.torch:
                problem = f"{stack.runtime} needs torch {stack.torch}, and there is {found.torch or 'none'}"
            if problem is None:
                return stack.runtime
            problems.append(problem)
    raise RuntimeError(
        f"nothing in {where} can run graphs on {target}: {'; or '.join(problems)}; name another Python, which has what "
        f"NEURON.md lists, by rank_python or OPTIMUM_NEURON_RANK_PYTHON"
    )


def check_lowering() -> None:
    """Raise RuntimeError, with the remedy, where graphs cannot be lowered to HLO, or run as such, here."""
    for module, package in (("torch_xla", "torch-xla"), ("google.protobuf", "protobuf")):
        if not _is_there(module):
            raise RuntimeError(
                f"graphs in HLO need {package}, which is not installed with torch {version('torch')}; make an "
                f"environment with torch 2.9 and pip install 'optimum-neuron-runtime[neuron]' there"
            )


def check_reading() -> None:
    """Raise RuntimeError, with the remedy, where HLO cannot be read here; any torch will do."""
    if not _is_there("google.protobuf"):
        raise RuntimeError("to read graphs in HLO takes protobuf, which is not installed here; pip install protobuf")


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent package
        return False
