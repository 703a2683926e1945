# SPDX-License-Identifier: Apache-2.0
"""Bytes of an artifact: its weights, and what a slot keeps for recurrences and convolutions."""

from __future__ import annotations

import math

import torch

from optimum_neuron.artifacts.artifact import WEIGHTS_NAME, Artifact


_KEPT = ("kv_cache.state_", "kv_cache.conv_")


def weights_bytes(artifact: Artifact) -> int:
    """Of the file of weights."""
    return int(artifact.manifest["files"][WEIGHTS_NAME]["size"])


def state_bytes(artifact: Artifact) -> int:
    """Of one slot's states of recurrences and convolutions."""
    states = [state for state in artifact.states() if state.name.startswith(_KEPT)]
    return sum(math.prod(state.shape[1:]) * getattr(torch, state.dtype).itemsize for state in states)
