# SPDX-License-Identifier: Apache-2.0
"""Groups of the options that make a NeuronConfig, for an export and for the commands that estimate or check one."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from optimum_neuron.command_options import add_declared
from optimum_neuron.config import NeuronConfig, OptionSpec


# Titles of the groups in the declarations.
_GROUPS = {
    "prompts": ("prompts", "How a step takes them in, in tokens."),
    "cache": ("cache", "Keys, values and states of requests."),
    "weights": ("weights and activations", None),
    "sampling": ("sampling and logits", "Graphs choose the next token themselves."),
    "devices": ("devices", None),
}
# The options that choose how weights, keys and values are stored.
_CODES = (
    "quantization", "quantization_group_size", "quantization_zero_point", "quantization_exclude", "kv_cache_dtype",
)  # fmt: skip


def add_graph_options(parser: ArgumentParser, basics: Any = None) -> Any:
    """Add all options of a NeuronConfig, the most usual ones to the group `basics` or a new one, and return the group of devices."""
    basic = _declared("basic")
    basic.sort(key=lambda each: each.name != "target")
    add_declared(parser.add_argument_group("basic options") if basics is None else basics, basic)
    groups = {}
    for name, titles in _GROUPS.items():
        groups[name] = parser.add_argument_group(*titles)
        add_declared(groups[name], _declared(name))
    return groups["devices"]


def add_size_options(group: Any) -> None:
    """Add the sizes of a NeuronConfig."""
    sizes = _declared("basic", "prompts", "cache", "sampling")
    add_declared(group, [each for each in sizes if each.name not in ("target", *_CODES)])


def add_quantization_options(parser: ArgumentParser) -> None:
    """Add the options that choose how weights, keys and values are stored."""
    declared = NeuronConfig.declared()
    group = parser.add_argument_group("quantization", "How weights, keys and values are stored.")
    add_declared(group, [declared[name] for name in _CODES])


def _declared(*groups: str) -> list[OptionSpec]:
    return [each for group in groups for each in NeuronConfig.declared().values() if each.group == group]
