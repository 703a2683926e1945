# SPDX-License-Identifier: Apache-2.0
"""Models with a bias by column on the cpu target: exact, and the same bits in slots, in blocks, and however prompts are cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from biased import BLOCKS, PIECES, PROMPT, SIZES, answers, model_of, own_logits, same
from helpers import artifact_runner, export_tiny


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["bloom", *(pytest.param(each, marks=pytest.mark.full) for each in ("mpt", "falcon"))]
)
def test_the_cpu_target_computes_it_by_its_kernel_in_slots_and_in_blocks(name: str, tmp_path: Path) -> None:
    model_of(name).save_pretrained(tmp_path / "checkpoint")
    slots, blocks = (
        artifact_runner(export_tiny(tmp_path / "checkpoint", tmp_path / folder, **sizes, target="cpu"))
        for folder, sizes in (("slots", SIZES), ("blocks", BLOCKS))
    )
    found = answers(slots, 1, PIECES[0])
    text = [*PROMPT.tolist(), *(3 + index for index in range(5))]
    exact, own = (
        own_logits(name, text, dtype)[len(PROMPT) - 1 :].double() for dtype in (torch.float64, torch.float32)
    )
    assert (torch.stack(found) - exact).abs().max() <= 2 * (own - exact).abs().max()
    if name == "falcon":
        return  # its linear layers are products of its own code, left to torch, whose bits follow the graph
    slots.reset_slots()
    assert same(answers(slots, 0, PIECES[1], beside=False), found)
    blocks.assign_blocks(1, 0, (5, 0, 2))
    blocks.assign_blocks(2, 0, (3, 4))
    assert same(answers(blocks, 1, PIECES[1]), found)
