# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities that graphs tell are those of the eager target, and artifacts without them say how to get them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import artifact_runner, export_tiny, random_tokens
from neuron_fixtures import certificate_of

from optimum_neuron.core import PromptPiece, StepOutput
from optimum_neuron.runtime.step_tensors import DecodeRows
from optimum_neuron.step.spec import CHUNK, DECODE, GREEDY, LOGPROBS


NOISE = 1e-6  # of logits between -1 and 1, by other orders of summation in float32
COUNT = 3


def export(checkpoint: Path, folder: Path, target: str, **options: Any) -> Path:
    return export_tiny(checkpoint, folder, target=target, output_logits=False, **options)


def two_steps(path: Path) -> tuple[StepOutput, list[list[list[float]]]]:
    """The outputs of a decode step, and what is told of its rows and of the chunks before."""
    runner = artifact_runner(path)
    prompts = [PromptPiece(2, random_tokens(5)), PromptPiece(0, random_tokens(7))]
    chunks = runner.run_step(prompts)
    told = [runner.find_logprobs(CHUNK, [1, 0], chunks)]
    active = np.array([True, False, True])
    decode = runner.run_step(
        (), DecodeRows(np.array([7, 0, 9], np.int32), active, np.array([GREEDY] * 3, np.float32), np.zeros(3))
    )
    told.append(runner.find_logprobs(DECODE, [2, 0], decode))
    return decode, [[each.tolist() for each in found] for found in told]


@pytest.mark.parametrize("count", [pytest.param(0, marks=pytest.mark.full), COUNT])
def test_graphs_tell_what_the_eager_target_does_and_are_certified(
    count: int, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    paths = {
        name: export(tiny_checkpoint, tmp_path / name, name, top_logprobs=count, certificate=name == "hlo")
        for name in ("eager", "hlo")
    }
    assert (paths["hlo"] / "graphs" / f"{LOGPROBS}.hlo").exists()
    (eager, expected), (hlo, found) = two_steps(paths["eager"]), two_steps(paths["hlo"])
    assert eager.decode_logits is not None and hlo.decode_logits is None
    for group, other in zip(found, expected, strict=True):
        for part, known in zip(group, other, strict=True):
            torch.testing.assert_close(torch.tensor(part), torch.tensor(known), atol=NOISE, rtol=0)
    assert torch.tensor(found[1][2]).shape == (2, count)
    compared = {each.subject for each in certificate_of(paths["hlo"]).comparisons}
    parts = ["logprobs", "ranks", *(f"top_tokens.{place}" for place in range(count))]
    assert {f"{DECODE}.{part}" for part in parts} <= compared


def test_an_artifact_without_them_says_how_to_get_them(tiny_checkpoint: Path, tmp_path: Path) -> None:
    runner = artifact_runner(export(tiny_checkpoint, tmp_path / "artifact", "eager"))
    with pytest.raises(ValueError, match=r"has no log-probabilities; export it with --top-logprobs"):
        runner.find_logprobs(CHUNK, [0], runner.run_step([PromptPiece(0, random_tokens(3))]))
