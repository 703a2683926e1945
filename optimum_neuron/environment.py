# SPDX-License-Identifier: Apache-2.0
"""What this installation and this machine are, for a report of a fault."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

from .artifacts.user_cache import cache_root
from .targets.cpu.host import instruction_set
from .targets.cpu.native_build import compiler
from .version import __version__


# What results and errors depend on, where it is installed.
_PACKAGES = (
    "torch",
    "transformers",
    "optimum",
    "huggingface-hub",
    "safetensors",
    "gguf",
    "peft",
    "vllm",
    "torch-xla",
    "neuronx-cc",
    "nrtpy",
)
_NONE = "not installed"


def environment() -> dict[str, str]:
    """Versions of this package and of those that it runs on, and what of the machine decides on kernels, by name."""
    found = {"`optimum-neuron-runtime` version": __version__}
    found |= {f"`{name}` version": _version(name) for name in _PACKAGES}
    return found | {
        "C++ compiler": compiler() or _NONE,
        "Instruction set": f"{instruction_set().name} ({platform.machine()}, {os.cpu_count()} cores)",
        "Platform": platform.platform(),
        "Python version": sys.version.split()[0],
        "Cache": str(cache_root()),
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return _NONE
