# SPDX-License-Identifier: Apache-2.0
"""Sizes of an artifact: bytes of its weights and of what a slot keeps for recurrences and convolutions; operations of a prompt."""

from __future__ import annotations

import math

import torch
from safetensors import safe_open

from optimum_neuron.artifact.artifact import WEIGHTS_NAME, Artifact


_KEPT = ("kv_cache.state_", "kv_cache.conv_")


def weights_bytes(artifact: Artifact) -> int:
    """Of the file of weights."""
    return int(artifact.manifest["files"][WEIGHTS_NAME]["size"])


def state_bytes(artifact: Artifact) -> int:
    """Of one slot's states of recurrences and convolutions."""
    states = [state for state in artifact.states() if state.name.startswith(_KEPT)]
    return sum(math.prod(state.shape[1:]) * getattr(torch, state.dtype).itemsize for state in states)


def prompt_operations(artifact: Artifact, rows: int, tokens: int) -> int:
    """Of products with weights, two for each multiplication: of each token with a layer's matrices, of each row's last one with the head."""
    with safe_open(artifact.file(WEIGHTS_NAME), framework="pt") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118 - it is no dict
    matrices = [shape for shape in shapes if len(shape) == 2]
    vocab_size = artifact.model.vocab_size
    layers = sum(math.prod(shape) for shape in matrices if vocab_size not in shape)
    head = max(math.prod(shape) for shape in matrices if vocab_size in shape)
    return 2 * rows * (tokens * layers + head)
