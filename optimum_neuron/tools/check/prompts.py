# SPDX-License-Identifier: Apache-2.0
"""Prompts that checks run on."""

from __future__ import annotations

import numpy as np
import torch

from ...artifact.artifact import Artifact
from ...runtime.runner import GraphRunner
from ...runtime.step_tensors import chunks_of


def prefill(runner: GraphRunner, slot: int, prompt: np.ndarray, pieces: int) -> torch.Tensor:
    """Logits `[vocab]` behind a prompt that a slot takes in from its start, so many tokens at a time."""
    runner.lengths[slot] = 0
    for chunk in chunks_of(slot, prompt, pieces):
        output = runner.prefill([chunk])
    assert output.chunk_logits is not None
    return output.chunk_logits[0].clone()


def prompt_of(artifact: Artifact, length: int, seed: int) -> np.ndarray:
    """Token ids `[length]`, int32."""
    return np.random.default_rng(seed).integers(0, artifact.model.vocab_size, length).astype(np.int32)
