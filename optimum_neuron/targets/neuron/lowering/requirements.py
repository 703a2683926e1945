# SPDX-License-Identifier: Apache-2.0
"""What lowering needs of this machine; imports none of it."""

from __future__ import annotations

import importlib.util
from importlib.metadata import version


def check_lowering() -> None:
    """Raises RuntimeError, with the remedy, where graphs cannot be lowered to HLO here."""
    for module, package in (("torch_xla", "torch-xla"), ("google.protobuf", "protobuf")):
        if not _is_there(module):
            raise RuntimeError(
                f"lowering graphs to HLO needs {package}, which is not installed beside torch {version('torch')}; make an "
                f"environment with torch 2.9 and pip install 'optimum-neuron-runtime[neuron]' there"
            )


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent package
        return False
