# SPDX-License-Identifier: Apache-2.0
"""optimum-cli neuron env, and its lines in optimum-cli env: versions and machine, for a report of a fault."""

from __future__ import annotations

import os
import platform
from argparse import ArgumentParser
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo
from optimum.commands.env import EnvironmentCommand

from optimum_neuron.cli import explain, reported_errors
from optimum_neuron.version import __version__


# Results and errors depend on these.
PACKAGES = ("torch", "transformers", "optimum", "huggingface-hub", "gguf", "peft", "vllm", "torch-xla", "neuronx-cc", "nrtpy")  # fmt: skip
DESCRIPTION = "Print the versions of this package and of what it runs on, this machine's instruction set, and where the cache lies."
EXAMPLES = "example:\n  optimum-cli neuron env\n"


class NeuronEnvCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo(name="env", help="Print versions and machine, for a report of a fault.")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        explain(parser, DESCRIPTION, EXAMPLES)

    @reported_errors()
    def run(self) -> None:
        print(_lines({"Platform": platform.platform(), "Python version": platform.python_version()}), end="")


_optimum_lines = EnvironmentCommand.format_dict


def _lines(others: Mapping[str, str]) -> str:
    from optimum_neuron.artifact.user_cache import cache_root
    from optimum_neuron.kernels.host.instruction_sets import choose_instruction_set
    from optimum_neuron.kernels.host.native_build import find_compiler

    machine = {
        "Instruction set": f"{choose_instruction_set().name} ({platform.machine()}, {os.cpu_count()} cores)",
        "C++ compiler": find_compiler() or "not installed",
        "Cache": str(cache_root()),
    }
    found = {"`optimum-neuron-runtime` version": __version__}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[f"`{name}` version"] = version(name)
        found.setdefault(f"`{name}` version", "not installed")
    return _optimum_lines(found | machine | dict(others))


# optimum has no place for other packages in its own command, and people paste its lines into reports.
EnvironmentCommand.format_dict = staticmethod(_lines)
