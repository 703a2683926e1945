# SPDX-License-Identifier: Apache-2.0
"""The command that exports an artifact again, from its manifest. Imports no torch."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from ..config import ExportOptions, NeuronConfig


_UNKNOWN = "MODEL"


def export_command(manifest: Mapping[str, Any], config: NeuronConfig, output: str) -> str:
    """Return a line for a shell that exports an artifact to the folder `output`.

    It leaves out options that follow from the others, and folders of a checkpoint or adapter. A placeholder stands for a name that does not
    print. The beginning of its sha256 names a text that weights were rounded on.
    """
    origin = manifest.get("origin", {})
    options = ExportOptions(
        revision=origin.get("revision"),
        adapter=adapter_names(manifest) or None,
        dequantize=origin.get("dequantize", False),
        quantization_calibration=f"{origin['calibration'][:12]}.txt" if "calibration" in origin else None,
        trust_remote_code=any(name.endswith(".py") for name in manifest["files"]),
    )
    words = [
        "optimum-cli",
        "export",
        "neuron",
        "--model",
        origin.get("repo") or printable_name(manifest.get("source", "")),
    ]
    folder = output if output.isprintable() and not output.startswith("-") else "artifact/"
    return shlex.join([*words, *reading_words(options), *option_words(config), folder])


def reading_words(options: ExportOptions) -> list[str]:
    """Return the words of a command line that give these options; it never names a token."""
    declared = ExportOptions.declared()
    given = {
        name: getattr(options, name)
        for name in ("revision", "adapter", "dequantize", "quantization_calibration", "trust_remote_code")
    }
    return [word for name, value in given.items() if value for word in declared[name].command_words(value)]


def option_words(config: NeuronConfig) -> list[str]:
    """Return the words of a command line that make a config."""
    declared = NeuronConfig.declared()
    needed = {name: value for name, value in needed_options(config).items() if value is not None}
    return [word for name, value in needed.items() for word in declared[name].command_words(value)]


def adapter_names(manifest: Mapping[str, Any]) -> list[str]:
    """Return the names of the adapters that were merged."""
    sources = (each.get("source") for each in manifest.get("adapters", []))
    return [printable_name(source) for source in sources if isinstance(source, str)]


def printable_name(source: str) -> str:
    """Return a Hub id as it is, the last part of a path, and a placeholder for a name that does not print or looks like an option."""
    is_path = source.startswith(("/", "~", ".")) or source.count("/") > 1 or "\\" in source
    name = PurePath(source.replace("\\", "/")).name if is_path else source.rstrip("/")
    return name if name and name.isprintable() and not name.startswith("-") else _UNKNOWN


def needed_options(config: NeuronConfig) -> dict[str, Any]:
    """Return the options of a config that do not follow from the others."""
    if config.quantization is None or config.target != "cpu":
        config = dataclasses.replace(config, activations=config.activations or "auto")
    options = config.to_dict() | {"activations": config.activations or "none"}
    for name in config.option_names():
        fewer = {other: value for other, value in options.items() if other != name}
        if name not in ("target", "dtype", "batch_size", "sequence_length") and _makes_config(fewer, config):
            options = fewer
    return options


def _makes_config(options: Mapping[str, Any], config: NeuronConfig) -> bool:
    try:
        return NeuronConfig.from_dict(options) == config
    except ValueError:  # options that contradict the default of another one
        return False
