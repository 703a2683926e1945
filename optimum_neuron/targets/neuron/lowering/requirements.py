# SPDX-License-Identifier: Apache-2.0
"""What this machine needs for graphs in HLO; imports none of it."""

from __future__ import annotations

import importlib.util
from importlib.metadata import version


_TORCH_XLA, _PROTOBUF = ("torch_xla", "torch-xla"), ("google.protobuf", "protobuf")


def check_lowering() -> None:
    """Raises RuntimeError, with the remedy, where graphs cannot be lowered to HLO, or run as such, here."""
    _check(_TORCH_XLA, _PROTOBUF)


def check_reading() -> None:
    """Raises RuntimeError, with the remedy, where HLO cannot be read here."""
    _check(_PROTOBUF)


def _check(*needed: tuple[str, str]) -> None:
    for module, package in needed:
        if not _is_there(module):
            raise RuntimeError(
                f"graphs in HLO need {package}, which is not installed beside torch {version('torch')}; make an "
                f"environment with torch 2.9 and pip install 'optimum-neuron-runtime[neuron]' there"
            )


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent package
        return False
