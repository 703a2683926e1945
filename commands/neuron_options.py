# SPDX-License-Identifier: Apache-2.0
"""Options that several optimum-cli commands have: those of NeuronConfig and ExportOptions, and of running an artifact."""

from __future__ import annotations

import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from optimum_neuron.cli import add_option, console
from optimum_neuron.config import ExportOptions, NeuronConfig, OptionSpec
from optimum_neuron.config.option import REPEATED, SIZES, Options


_READING = ("revision", "token", "trust_remote_code")
# Titles of the groups in the declarations.
_GROUP_TITLES = {
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


def add_number(group: Any, flag: str, metavar: str, text: str, *, kind: type = int, **settings: Any) -> None:
    """Add an option with a whole number, or with another kind of number."""
    add_option(group, flag, type=kind, metavar=metavar, help=text, **settings)


def add_file(group: Any, flag: str, text: str) -> None:
    """Add an option with a file's name."""
    group.add_argument(flag, type=Path, metavar="FILE", help=text)


def add_artifact(parser: ArgumentParser, **settings: Any) -> None:
    """Add the folder of an artifact."""
    text = settings.pop("help", "folder that optimum-cli export neuron wrote")
    parser.add_argument("artifact", type=Path, help=text, **settings)


def add_declared(group: Any, declared: Iterable[OptionSpec]) -> None:
    """Add options of NeuronConfig or ExportOptions; `read_declared` reads them."""
    for each in declared:
        text = re.sub(r"`(\w+)`", lambda name: _flag(name[1]), each.off or each.help)
        if each.is_switch:
            settings: dict[str, Any] = {"action": "store_false" if each.off else "store_true", "default": each.default}
        else:
            settings = {"metavar": each.metavar, "choices": each.choices or None, "type": each.parse}
            settings |= {"action": "append"} if each.many == REPEATED else {"nargs": "+"} if each.many else {}
            settings |= {"type": read_sizes} if each.many == SIZES else {}
            text += f" (default: {each.default})" if not isinstance(each.default, tuple | None) else ""
        add_option(group, each.flag, dest=each.name, help=text, **settings)


def _flag(name: str) -> str:
    options = NeuronConfig.declared() | ExportOptions.declared()
    return options[name].flag.replace("--no-", "--")


def read_declared(args: Namespace, options: type[Options]) -> dict[str, Any]:
    """Return those options of a class that a command line gave, by name."""
    found = {}
    for name, each in options.declared().items():
        value = getattr(args, name, None)
        if value is not None and not (each.is_switch and value is each.default):
            found[name] = tuple(size for sizes in value for size in sizes) if each.many == SIZES else value
    return found


def add_graph_options(parser: ArgumentParser, basics: Any = None) -> Any:
    """Add all options of a NeuronConfig, the most usual ones to the group `basics` or a new one, and return the group of devices."""
    basic = _declared_in("basic")
    basic.sort(key=lambda each: each.name != "target")
    add_declared(parser.add_argument_group("basic options") if basics is None else basics, basic)
    groups = {}
    for name, titles in _GROUP_TITLES.items():
        groups[name] = parser.add_argument_group(*titles)
        add_declared(groups[name], _declared_in(name))
    return groups["devices"]


def add_size_options(group: Any) -> None:
    """Add the sizes of a NeuronConfig."""
    sizes = _declared_in("basic", "prompts", "cache", "sampling")
    add_declared(group, [each for each in sizes if each.name not in ("target", *_CODES)])


def add_quantization_options(parser: ArgumentParser) -> None:
    """Add the options that choose how weights, keys and values are stored."""
    declared = NeuronConfig.declared()
    group = parser.add_argument_group("quantization", "How weights, keys and values are stored.")
    add_declared(group, [declared[name] for name in _CODES])


def _declared_in(*groups: str) -> list[OptionSpec]:
    return [each for group in groups for each in NeuronConfig.declared().values() if each.group == group]


def given_options(args: Namespace) -> dict[str, Any]:
    """Return the options of a NeuronConfig that were given, except those of the hardware."""
    given = read_declared(args, NeuronConfig)
    return {name: value for name, value in given.items() if name not in ("target", "tensor_parallel_size")}


def add_model_options(group: Any, *, required: bool) -> None:
    """Add options that name a model, of which a command reads the config alone."""
    text = "Hub id, folder with a config.json, .gguf file, or exported artifact"
    group.add_argument("-m", "--model", required=required, help=text)
    add_checkpoint_options(group)


def add_checkpoint_options(group: Any) -> None:
    """Add the options that find and read a checkpoint; `hub_options` reads them."""
    declared = ExportOptions.declared()
    add_declared(group, [declared[name] for name in _READING])


def add_named_model(parser: ArgumentParser) -> None:
    """Add the artifact or checkpoint that a command runs, and how a checkpoint is found; `first_use.open_named` reads them."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="folder that optimum-cli export neuron wrote; or a Hub id, a checkpoint folder, a .gguf file or org/repo:file.gguf, "
        "which is exported into the cache on first use",
    )
    group = parser.add_argument_group("export on first use", "A folder that was exported has its own sizes.")
    texts = {
        "batch_size": "requests served at the same time (default: 4)",
        "sequence_length": "prompt and answer of one request together (default: the model's longest, at most 4096)",
    }
    declared = NeuronConfig.declared()
    add_declared(group, [replace(declared[name], default=None, help=text) for name, text in texts.items()])
    add_checkpoint_options(group)


def add_rank_options(parser: Any) -> None:
    """Add the options of the processes that hold a Neuron device's ranks."""
    text = "on a Neuron device, the interpreter of an environment with numpy and a runtime (NEURON.md names them), for the processes "
    text += "that hold its ranks (default: OPTIMUM_NEURON_RANK_PYTHON, or this one)"
    add_option(parser, "--rank-python", metavar="PYTHON", help=text)
    text = "on a Neuron device, how long one step may take (default: NEURON_RT_EXEC_TIMEOUT, or 600)"
    add_number(parser, "--rank-timeout", "SECONDS", text, kind=float)


def hub_options(args: Namespace) -> dict[str, Any]:
    """Return the options that find and read a checkpoint, as keywords."""
    return {name: getattr(args, name) for name in _READING}


def run_options(args: Namespace) -> dict[str, Any]:
    """Return the options that load an artifact, as keywords."""
    return {name: getattr(args, name) for name in ("trust_remote_code", "rank_python", "rank_timeout")}


def add_profile_option(parser: Any) -> None:
    """Add the folder for a profile."""
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="FOLDER",
        help="write a profile to a new folder: trace.json, for ui.perfetto.dev, with all steps and runs of graphs, on the cpu "
        "target also the operators of the first runs of each graph; of a Neuron device also device/, for neuron-explorer or "
        "neuron-profile, with the first run of each graph on each core (NEURON_RT_INSPECT_DEVICE_PROFILE=session: all runs)",
    )


def print_profile(folder: Path | None) -> None:
    """Print where the profile is that was asked for, if one was."""
    if folder is not None and folder.is_dir():
        parts = {"trace.json": "ui.perfetto.dev", "device": "neuron-explorer or neuron-profile"}
        found = [f"{name} for {reader}" for name, reader in parts.items() if (folder / name).exists()]
        console(stderr=True).print(f"profile in {folder}: {', '.join(found)}", soft_wrap=True)


def read_sizes(text: str) -> list[int]:
    """Return whole numbers that commas separate, as an argparse type."""
    try:
        return [int(part) for part in text.split(",") if part]
    except ValueError:
        raise ArgumentTypeError(
            f"{text!r} is not a list of whole numbers; an output folder goes before this option"
        ) from None
