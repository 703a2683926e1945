# SPDX-License-Identifier: Apache-2.0
"""Which versions go together: what each runtime takes of Python and torch, on which targets; NEURON.md shows the same to people.

A rank's process has an interpreter of its own, so its torch need not be this package's, nor vLLM's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..rank.packages import NEURONX_DISTRIBUTED, NRTPY, TORCH_LITE, TORCH_NEURONX, Package
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
    """A runtime, and what it goes with.

    Attributes:
        runtime: its name, as messages have it.
        torch: None where it needs none.
        sdk: releases of the Neuron SDK that have it, as far as their documents were read.
        source: where its versions are documented.
    """

    runtime: str
    targets: tuple[str, ...]
    packages: tuple[Package, ...]
    python: Versions
    torch: Versions | None
    sdk: Versions
    source: str


NRT, LITE, NXD = NRTPY.distribution, TORCH_LITE.distribution, NEURONX_DISTRIBUTED.distribution
# The preferred one first.
STACKS = (
    Stack(
        NRT,
        ("inf2", "trn1", "trn2", "trn3"),
        (NRTPY,),
        Versions("3.11", "3.14"),
        None,
        Versions("2.32", "2.32"),
        "neuron-runtime/nrtpy/index.rst",
    ),
    Stack(
        LITE,
        ("trn2", "trn3"),
        (TORCH_LITE,),
        Versions("3.11", "3.13"),
        Versions("2.10", "2.12"),
        Versions("2.32", "2.32"),
        "n2-manifest.json, announcement-python-3-10-eol.rst",
    ),
    Stack(
        NXD,
        ("inf2", "trn1", "trn2"),
        (TORCH_NEURONX, NEURONX_DISTRIBUTED),
        Versions("3.10", "3.13"),
        Versions("2.9", "2.9"),
        Versions("2.29", "2.31"),
        "announce-maintenance-pytorch-xla-inference.rst, announcement-python-3-9-eol.rst",
    ),
)


@dataclass(frozen=True)
class Found:
    """What an interpreter has.

    Attributes:
        python: its version.
        torch: its version; None where it has none.
        problems: by distribution, why a package of a runtime cannot be used; None where it can.
    """

    python: str
    torch: str | None
    problems: Mapping[str, str | None]


def choose_runtime(target: str, found: Found, where: str) -> str:
    """The first runtime for a target that an interpreter has, with versions that go together.

    Args:
        where: the interpreter, for the message.

    Raises:
        RuntimeError: it has none; the message says what each lacks.
    """
    problems = []
    for stack in STACKS:
        if target in stack.targets:
            problem = _problem(stack, found)
            if problem is None:
                return stack.runtime
            problems.append(problem)
    raise RuntimeError(
        f"nothing in {where} can run graphs on {target}: {'; or '.join(problems)}; name another Python, which has what "
        f"NEURON.md lists, by rank_python or OPTIMUM_NEURON_RANK_PYTHON"
    )


def _problem(stack: Stack, found: Found) -> str | None:
    missing = next(filter(None, (found.problems[each.distribution] for each in stack.packages)), None)
    if missing is not None:
        return missing
    if found.python not in stack.python:
        return f"{stack.runtime} needs Python {stack.python}, and this is {found.python}"
    if stack.torch is not None and (found.torch is None or found.torch not in stack.torch):
        return f"{stack.runtime} needs torch {stack.torch}, and there is {found.torch or 'none'}"
    return None
