# SPDX-License-Identifier: Apache-2.0
"""vLLM's platform plugin: vLLM schedules and serves, this project's graphs compute.

Every vLLM process in an environment with the plugin imports this module, so it imports nothing heavy.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import entry_points
from pathlib import Path


PLUGIN_NAME = "optimum_neuron"
PLATFORM_GROUP = "vllm.platform_plugins"


def platform_plugin() -> str | None:
    """Entry point `vllm.platform_plugins`: the platform's class, or None where this vLLM is not ours."""
    return "optimum_neuron.vllm.platform.NeuronPlatform" if is_wanted() else None


def general_plugin() -> None:
    """Entry point `vllm.general_plugins`: change what vLLM would refuse before its platform sees it."""
    from vllm.platforms import current_platform

    if current_platform.device_name == PLUGIN_NAME:
        from .patches import patch_process

        patch_process()


def is_wanted() -> bool:
    """Return whether this plugin is vLLM's platform; vLLM does not know its model yet.

    In this order: yes where `VLLM_PLUGINS` names it; no where `VLLM_TARGET_DEVICE` names another device; yes where the command
    line names an artifact; no where another platform plugin is installed; then where this machine has Neuron devices, or
    no device that vLLM itself can use.
    """
    from ..targets.neuron.sdk.devices import find_devices

    if PLUGIN_NAME in (name.strip() for name in os.environ.get("VLLM_PLUGINS", "").split(",")):
        return True
    if os.environ.get("VLLM_TARGET_DEVICE", "empty") not in ("", "empty", "neuron"):
        return False
    if any(_names_artifact(argument) for argument in sys.argv[1:]):
        return True
    if any(entry.name != PLUGIN_NAME for entry in entry_points(group=PLATFORM_GROUP)):
        return False
    if find_devices() is not None:
        return True
    from vllm.platforms import builtin_platform_plugins

    return not any(plugin() is not None for plugin in builtin_platform_plugins.values())


def _names_artifact(argument: str) -> bool:
    """Return whether a command line argument, `out/` or `--model=out/`, is the folder of an artifact."""
    from ..artifact.artifact import FORMAT, MANIFEST_NAME

    path = Path(argument.partition("=")[2] if argument.startswith("--") else argument) / MANIFEST_NAME
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False  # no folder, or none of ours
    return isinstance(manifest, dict) and manifest.get("format") == FORMAT
