# SPDX-License-Identifier: Apache-2.0
"""vLLM's platform plugin: vLLM schedules and serves, this project's graphs compute.

This module is imported by every vLLM process in an environment where the plugin is installed, and so imports nothing.
"""

from __future__ import annotations


def platform_plugin() -> str | None:
    """Entry point `vllm.platform_plugins`: the platform's class, or None where this vLLM is not ours."""
    from .activation import is_wanted

    return "optimum_neuron.vllm.platform.NeuronPlatform" if is_wanted() else None


def general_plugin() -> None:
    """Let vLLM accept every architecture without modelling code of its own, and note which of its arguments a user gave.

    This is the entry point `vllm.general_plugins`.
    """
    from vllm.platforms import current_platform

    from .activation import PLUGIN_NAME

    if current_platform.device_name == PLUGIN_NAME:
        from .patches import patch_process

        patch_process()
