# SPDX-License-Identifier: Apache-2.0
"""The command that exports an artifact again, from what its manifest says. Imports no torch."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from ..config import NeuronConfig


# Options that are turned off by a flag of another name.
_OFF = {"mixed_step": "--no-mixed-step", "on_device_sampling": "--no-on-device-sampling"}
_REPEATED = ("quantization_exclude",)
_SPACED = ("kernels",)
_UNKNOWN = "MODEL"


def export_command(manifest: Mapping[str, Any], config: NeuronConfig, output: str) -> str:
    """A line for a shell.

    Options that follow from the others are left out. Of a checkpoint or adapter in a local folder the name alone is told, and of one
    whose name does not print, none. A text that weights were rounded on is named by the beginning of its sha256.

    Args:
        output: the folder to write.
    """
    origin = manifest.get("origin", {})
    words = ["optimum-cli", "export", "neuron", "--model", origin.get("repo") or named(manifest.get("source", ""))]
    if "revision" in origin:
        words += ["--revision", origin["revision"]]
    for adapter in adapters(manifest):
        words += ["--adapter", adapter]
    if origin.get("dequantize"):
        words.append("--dequantize")
    if "calibration" in origin:
        words += ["--quantization-calibration", f"{origin['calibration'][:12]}.txt"]
    if any(name.endswith(".py") for name in manifest["files"]):
        words.append("--trust-remote-code")
    return shlex.join(
        [*words, *option_words(config), output if output.isprintable() and not output.startswith("-") else "artifact/"]
    )


def option_words(config: NeuronConfig) -> list[str]:
    """The words of a command line that make a config."""
    return [word for name, value in needed_options(config).items() for word in _flags(name, value)]


def adapters(manifest: Mapping[str, Any]) -> list[str]:
    """The adapters that were merged, by name."""
    sources = (each.get("source") for each in manifest.get("adapters", []))
    return [named(source) for source in sources if isinstance(source, str)]


def named(source: str) -> str:
    """A Hub id as it is, the last part of a path, and a placeholder for what does not print or would be an option."""
    is_path = source.startswith(("/", "~", ".")) or source.count("/") > 1 or "\\" in source
    name = PurePath(source.replace("\\", "/")).name if is_path else source.rstrip("/")
    return name if name and name.isprintable() and not name.startswith("-") else _UNKNOWN


def needed_options(config: NeuronConfig) -> dict[str, Any]:
    """The options of which a config follows; those that do not follow from the others."""
    if config.quantization is None or config.target != "cpu":
        config = dataclasses.replace(config, activations=config.activations or "auto")
    options = config.to_dict() | {"activations": config.activations or "none"}
    for name in config.option_names():
        fewer = {other: value for other, value in options.items() if other != name}
        if name not in ("target", "dtype", "batch_size", "sequence_length") and _makes(fewer, config):
            options = fewer
    return options


def _makes(options: Mapping[str, Any], config: NeuronConfig) -> bool:
    try:
        return NeuronConfig.from_dict(options) == config
    except ValueError:  # of options that contradict what another one would be by default
        return False


def _flags(name: str, value: Any) -> Iterator[str]:
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        yield flag if value else _OFF[name]
    elif isinstance(value, list) and name in _REPEATED:
        for each in value:
            yield from (flag, each)
    elif isinstance(value, list) and name in _SPACED:
        yield from (flag, *value)
    elif isinstance(value, list):
        yield from (flag, ",".join(map(str, value)))
    elif value is not None:
        yield from (flag, str(value))
