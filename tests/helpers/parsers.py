# SPDX-License-Identifier: Apache-2.0
"""All commands of this package by their words, and the parser of each."""

from __future__ import annotations

import importlib
from argparse import ArgumentParser
from functools import cache
from typing import Any


@cache
def command_classes() -> dict[tuple[str, ...], Any]:
    neuron = importlib.import_module("optimum.commands.register.neuron").NeuronCommand
    export = importlib.import_module("optimum.commands.register.export_neuron").NeuronExportCommand
    found = {("export", "neuron"): export, ("neuron",): neuron}
    for each in neuron.SUBCOMMANDS:
        found["neuron", each.name] = each.subcommand_class
        for sub in each.subcommand_class.SUBCOMMANDS:
            found["neuron", each.name, sub.name] = sub.subcommand_class
    return found


@cache
def parser_of(words: tuple[str, ...]) -> ArgumentParser:
    parser = ArgumentParser()
    command_classes()[words].parse_args(parser)
    return parser
