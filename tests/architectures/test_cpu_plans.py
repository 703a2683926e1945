# SPDX-License-Identifier: Apache-2.0
"""Every architecture as plans for the CPU: what eager steps compute, and nothing that a live token needs is left out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from configs import ARCHITECTURES
from helpers import artifact_runner, export_tiny
from parity import PROMPT, make_checkpoint, run, tokens

from optimum_neuron.kernels.run.memory import PlanMemory
from optimum_neuron.targets.cpu.executable import LiveTokens


# One of each mechanism that plans treat apart: values kept from load, experts with biases, latent attention, convolutions. Plain
# attention and recurrences have tests of their own.
NEEDED = ("gptj", "gpt_oss", "deepseek_v3", "lfm2")
# Of the largest logit: kernels and torch add in different orders.
NOISE = 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in NEEDED else [pytest.mark.full]) for name in ARCHITECTURES]
)
def test_plans_compute_what_eager_steps_do(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        make_checkpoint(name, tmp_path / "checkpoint")
        sizes = {"sequence_length": 64, "ctx_batch_size": 1}
        eager = export_tiny(tmp_path / "checkpoint", tmp_path / "eager", target="eager", **sizes)
        cpu = export_tiny(tmp_path / "checkpoint", tmp_path / "cpu", target="cpu", **sizes)
    except (ImportError, AttributeError, ValueError) as error:
        assert name not in NEEDED, error  # tests of exactness say why others are refused
        return
    prompt, generated = tokens(PROMPT, seed=1), tokens(10, seed=2).tolist()
    expected, _ = run(artifact_runner(eager), prompt, generated)
    runner = artifact_runner(cpu)
    with monkeypatch.context() as patch:
        patch.setattr(LiveTokens, "__call__", lambda self, inputs: 1 << 40)
        whole, chosen = run(runner, prompt, generated)
    for place, logits in whole.items():
        assert (logits - expected[place]).abs().max() <= NOISE * expected[place].abs().max()
    _fill_memory_before_each_run(monkeypatch)
    found, again = run(runner, prompt, generated)
    assert again == chosen
    assert all(torch.equal(logits, whole[place]) for place, logits in found.items())


def _fill_memory_before_each_run(patch: pytest.MonkeyPatch) -> None:
    """With NaN, which as integers are no indices: what was left out and is needed shows."""
    start = PlanMemory.take_inputs

    def filled(memory: PlanMemory, inputs: Sequence[np.ndarray]) -> None:
        for buffer, place in zip(memory._buffers, range(len(memory._buffers)), strict=True):
            if buffer.kind == "arena" and buffer.bytes:
                memory._memory[place].fill(0xFF)
        start(memory, inputs)

    patch.setattr(PlanMemory, "take_inputs", filled)
