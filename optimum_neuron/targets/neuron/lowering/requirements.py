# SPDX-License-Identifier: Apache-2.0
"""What this machine needs for graphs in HLO; imports none of it."""

from __future__ import annotations

import importlib.util
from importlib.metadata import version


def check_lowering() -> None:
    """Raises RuntimeError, with the remedy, where graphs cannot be lowered to HLO, or run as such, here."""
    for module, package in (("torch_xla", "torch-xla"), ("google.protobuf", "protobuf")):
        if not _is_there(module):
            raise RuntimeError(
                f"graphs in HLO need {package}, which is not installed with torch {version('torch')}; make an "
                f"environment with torch 2.9 and pip install 'optimum-neuron-runtime[neuron]' there"
            )


def check_reading() -> None:
    """Raises RuntimeError, with the remedy, where HLO cannot be read here; any torch will do."""
    if not _is_there("google.protobuf"):
        raise RuntimeError("to read graphs in HLO takes protobuf, which is not installed here; pip install protobuf")


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent package
        return False
