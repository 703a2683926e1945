# SPDX-License-Identifier: Apache-2.0
"""Warming up runs every graph of an artifact once, those too that only some requests need, and changes no state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import artifact_runner, export_tiny, random_tokens, read_state, reuse_prefix, write_state
from torch import Tensor

from optimum_neuron.core import PromptPiece
from optimum_neuron.runtime.runner import GraphRunner
from optimum_neuron.runtime.step_tensors import DecodeRows
from optimum_neuron.step.spec import DECODE, SamplingParams
from optimum_neuron.targets.neuron.graphs.io import CACHE, CHOSEN, SCORES
from optimum_neuron.targets.neuron.run.executors import HloProgram


SAMPLED = SamplingParams(20, 0.9, 0.8)
OPTIONS: dict[str, Any] = {"top_logprobs": 2, "output_logits": False}


def sampled_steps(runner: GraphRunner) -> None:
    """A prompt whose token is drawn, a decode step that draws, log-probabilities, and a prefix that is reused."""
    runner.run_step([PromptPiece(1, random_tokens(5), SAMPLED, 0.5)])
    active, params = np.arange(runner.config.batch_size) == 1, [SAMPLED] * runner.config.batch_size
    tokens, uniforms = np.full(len(active), 7, np.int32), np.full(len(active), 0.25, np.float32)
    output = runner.run_step((), DecodeRows(tokens, active, np.array(params, np.float32), uniforms))
    runner.find_logprobs(DECODE, [1], output)
    reuse_prefix(runner, 0, 1, 4)


def compiled() -> int:
    """How many computations XLA has compiled in this process."""
    from torch_xla.debug import metrics

    found = metrics.metric_data("CompileTime")
    return 0 if found is None else int(found[0])


def live(runner: GraphRunner, name: str) -> Tensor:
    """A state, without what idle rows may write to: the trash slot, and logits that a step leaves anew."""
    state = read_state(runner.executable, name)
    return state[:-1] if name.startswith(CACHE) else state[:0] if name.startswith(SCORES) else state


def test_no_request_pays_for_the_first_run_of_a_graph(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = export_tiny(tiny_checkpoint, tmp_path / "out", target="hlo", batch_size=2, mixed_step=False, **OPTIONS)
    runner = artifact_runner(path)
    runs: Counter[str] = Counter()
    run = HloProgram.run_program

    def counted(program: HloProgram, inputs: Sequence[Tensor]) -> list[Tensor]:
        runs[names[program]] += 1
        return run(program, inputs)

    names = {program: name for name, program in runner.executable._programs.items()}
    monkeypatch.setattr(HloProgram, "run_program", counted)
    runner.run_step([PromptPiece(0, random_tokens(6))])
    runs.clear()
    write_state(runner.executable, CHOSEN, torch.tensor([11, 13], dtype=torch.int32))
    states = {name: live(runner, name) for name in runner.executable._states}
    runner.warm_up()
    assert all(torch.equal(live(runner, name), state) for name, state in states.items())
    assert runs == dict.fromkeys((each.stem for each in (path / "graphs").glob("*.hlo")), 1)
    assert {"sample_decode", "sample_chunk", "logprobs_decode", "copy_slot"} < runs.keys()
    before = compiled()
    sampled_steps(runner)
    assert compiled() == before
    runner.warm_up()
    assert max(runs.values()) == 2  # only sampled_steps ran a graph again
