# SPDX-License-Identifier: Apache-2.0
"""A run without readers of its outputs leaves out what only they need, and leaves the states to the bit as any other does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from helpers import artifact_runner, prefill_pieces, random_tokens, read_state, write_state
from torch import Tensor

from optimum_neuron.artifact.artifact import Artifact
from optimum_neuron.core import PromptPiece, StepOutput
from optimum_neuron.runtime.runner import GraphRunner
from optimum_neuron.runtime.step_rows import StepRows
from optimum_neuron.step.spec import GREEDY
from optimum_neuron.targets import Executable


PROMPT = random_tokens(19, seed=4)


def states_of(runner: GraphRunner, artifact: Artifact) -> dict[str, Tensor]:
    return {state.name: read_state(runner.executable, state.name) for state in artifact.states()}


def test_states_and_what_follows_are_the_same(cpu_artifact: Callable[[str], Path]) -> None:
    path = cpu_artifact("llama")
    artifact, found = Artifact.open(path), []
    for outputs in (True, False):
        runner = artifact_runner(path)
        for name, state in states_of(runner, artifact).items():
            write_state(runner.executable, name, torch.full_like(state, 0.5))
        for start in (0, 8):
            step = runner.run_step([PromptPiece(1, PROMPT[start : start + 8])], outputs=outputs)
            assert outputs or step == StepOutput()
        states = states_of(runner, artifact)
        found.append((states, prefill_pieces(runner, 1, PROMPT[16:], [3])))
    (whole, expected), (alone, logits) = found
    assert torch.equal(logits, expected)
    assert all(torch.equal(alone[name], state) for name, state in whole.items())


def test_parts_of_a_prompt_that_do_not_end_it_need_no_outputs(cpu_artifact: Callable[[str], Path]) -> None:
    """Seen by the operators that ran: of the last layer no more than its keys and values, and no logits."""
    runner = artifact_runner(cpu_artifact("llama"))
    executable, ran = runner.executable, []
    runner.executable = _Recording(executable, ran)
    request = _Request()
    rows: StepRows[_Request] = StepRows(runner)
    rows.start_request(request)
    assert rows.run_rows([], [PromptPiece(request.slot, PROMPT[:8], is_last=False)]) == []
    before, ran[:] = list(ran), []
    (_, token), *_ = rows.run_rows([], [PromptPiece(request.slot, PROMPT[8:16])])
    assert isinstance(token, int)
    assert before[-1].startswith("WriteCache") and ran[: len(before)] == before
    assert "Sample" in ran[len(before) :]


class _Recording(Executable):
    """An executable that runs by operators, and keeps their names."""

    def __init__(self, executable: object, ran: list[str]) -> None:
        self._executable, self._ran = executable, ran

    def run(self, graph: str, inputs: list[Tensor]) -> list[Tensor]:
        return self._executable.run_by_operators(graph, inputs, self._ran.append)

    def run_for_states(self, graph: str, inputs: list[Tensor]) -> None:
        self._executable.run_by_operators(graph, inputs, self._ran.append, outputs=False)


class _Request:
    """A request as the rows of a step know it."""

    slot, sampling, uniforms, on_host, logprobs = 1, GREEDY, None, False, False
