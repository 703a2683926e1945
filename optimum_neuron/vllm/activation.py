# SPDX-License-Identifier: Apache-2.0
"""The choice of our platform for a vLLM process, made before vLLM knows its model, and alike in all processes of an engine."""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import entry_points
from pathlib import Path

from ..artifact.artifact import FORMAT, MANIFEST_NAME
from ..targets.neuron.sdk.devices import find_devices


PLUGIN_NAME = "optimum_neuron"
PLATFORM_GROUP = "vllm.platform_plugins"


def is_wanted() -> bool:
    """Return whether this plugin is vLLM's platform.

    In this order: yes where `VLLM_PLUGINS` names it; no where `VLLM_TARGET_DEVICE` names another device; yes where the command
    line names an artifact; no where another platform plugin is installed; then where this machine has Neuron devices, or
    no device that vLLM itself can use.
    """
    if PLUGIN_NAME in (name.strip() for name in os.environ.get("VLLM_PLUGINS", "").split(",")):
        return True
    if os.environ.get("VLLM_TARGET_DEVICE", "empty") not in ("", "empty", "neuron"):
        return False
    if any(_names_artifact(argument) for argument in sys.argv[1:]):
        return True
    if any(entry.name != PLUGIN_NAME for entry in entry_points(group=PLATFORM_GROUP)):
        return False
    return find_devices() is not None or not _vllm_has_a_platform()


def _names_artifact(argument: str) -> bool:
    """Return whether a command line argument, `out/` or `--model=out/`, is the folder of an artifact."""
    path = Path(argument.partition("=")[2] if argument.startswith("--") else argument) / MANIFEST_NAME
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False  # no folder, or none of ours
    return isinstance(manifest, dict) and manifest.get("format") == FORMAT


def _vllm_has_a_platform() -> bool:
    from vllm.platforms import builtin_platform_plugins

    return any(plugin() is not None for plugin in builtin_platform_plugins.values())
