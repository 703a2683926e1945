# SPDX-License-Identifier: Apache-2.0
"""optimum-cli neuron env, and what it adds to optimum-cli env: versions and machine, for a report of a fault."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping
from typing import Any

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo
from optimum.commands.env import EnvironmentCommand

from optimum_neuron.cli import explain, reported_errors


DESCRIPTION = "Print the versions of this package and of what it runs on, this machine's instruction set, and where the cache lies."
EXAMPLES = "example:\n  optimum-cli neuron env\n"


class NeuronEnvCommand(BaseOptimumCLICommand):
    """`optimum-cli neuron env`."""

    COMMAND = CommandInfo(name="env", help="Print versions and machine, for a report of a fault.")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        explain(parser, DESCRIPTION, EXAMPLES)

    def run(self) -> None:
        with reported_errors():
            from optimum_neuron.environment import environment

            print(_optimum_lines(environment()), end="")


_optimum_lines = EnvironmentCommand.format_dict


def _with_ours(lines: Mapping[str, Any]) -> str:
    from optimum_neuron.environment import environment

    return _optimum_lines({**environment(), **lines})


# optimum has no place for other packages in its own command, whose lines people paste into reports.
EnvironmentCommand.format_dict = staticmethod(_with_ours)
