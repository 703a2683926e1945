# SPDX-License-Identifier: Apache-2.0
"""What a loaded artifact takes: which scales are short, memory of slots, live tokens of inputs, and runs without readers of outputs."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    artifact_runner,
    examples,
    export_tiny,
    prefill_pieces,
    random_tokens,
    read_state,
    tiny_config,
    write_state,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from optimum_neuron.artifact.artifact import Artifact
from optimum_neuron.core import PromptPiece, StepOutput
from optimum_neuron.kernels.plan import Plan
from optimum_neuron.kernels.run.bound_plan import BoundPlan
from optimum_neuron.runtime.runner import GraphRunner
from optimum_neuron.runtime.step_rows import StepRows
from optimum_neuron.step.spec import GREEDY, graph_specs
from optimum_neuron.targets import Executable
from optimum_neuron.targets.cpu.executable import LiveTokens


@pytest.mark.parametrize(
    ("options", "are_short"),
    [
        ({}, True),
        ({"quantization_zero_point": True}, False),
        ({"activations": "int8"}, False),
        ({"dtype": "float32"}, False),
    ],
)
def test_scales_of_an_export_in_int4_are_short_where_sums_need_not_be_scaled(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], are_short: bool
) -> None:
    options = {"dtype": "bfloat16", "quantization": "int4"} | options
    path = export_tiny(tiny_checkpoint, tmp_path / "artifact", target="cpu", **options)
    found: list[frozenset[str]] = []
    bind = Plan.bind

    def watched(*arguments: Any, **options: Any) -> BoundPlan:
        found.append(options["short_scales"])
        return bind(*arguments, **options)

    monkeypatch.setattr(Plan, "bind", watched)
    artifact_runner(path)
    assert len(set(found)) == 1  # all graphs sum alike
    assert all("_proj" in name for name in found[0])
    assert bool(found[0]) == are_short


@pytest.mark.skipif(sys.platform != "linux", reason="mincore(2) of other systems answers otherwise")
def test_warm_up_takes_the_memory_of_every_slot(tiny_checkpoint: Path, tmp_path: Path) -> None:
    sizes = {"batch_size": 128, "sequence_length": 256, "context_buckets": (256,), "prefill_chunk_size": 8}
    runner = artifact_runner(export_tiny(tiny_checkpoint, tmp_path / "artifact", target="cpu", **sizes))
    states: dict[str, np.ndarray] = runner.executable._states  # type: ignore[attr-defined]
    assert not all(resident_pages(state) for state in states.values())
    runner.warm_up()
    assert all(resident_pages(state) for state in states.values())
    assert not any(state[:-1].any() for state in states.values())


def resident_pages(array: np.ndarray) -> bool:
    """Return whether each page that lies within an array is in memory."""
    begin = -(-array.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    count = (array.ctypes.data + array.nbytes - begin) // mmap.PAGESIZE
    flags = (ctypes.c_ubyte * count)()
    place, size = ctypes.c_void_p(begin), ctypes.c_size_t(count * mmap.PAGESIZE)
    assert ctypes.CDLL(None).mincore(place, size, flags) == 0
    return all(flag & 1 for flag in flags)


SPECS = {spec.kind: spec for spec in graph_specs(tiny_config(batch_size=4))}


@pytest.mark.parametrize("kind", SPECS)
def test_live_tokens_end_with_the_last_that_is_none_of_padding(kind: str) -> None:
    spec = SPECS[kind]  # type: ignore[index]
    counts = LiveTokens(spec)
    inputs = [np.zeros(each.shape, each.dtype) for each in spec.inputs()]
    positions = [tensor for each, tensor in zip(spec.inputs(), inputs, strict=True) if "position_ids" in each.name]

    @examples(60)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        live: list[bool] = []
        for rows in positions:
            for row in rows:
                live += _draw_row(data, row)
        last = max((place + 1 for place, each in enumerate(live) if each), default=len(live))
        assert counts(inputs) == last

    check()


def _draw_row(data: st.DataObject, row: np.ndarray) -> Sequence[bool]:
    """Fills a row: idle, or tokens that follow each other, the last one repeated."""
    count = data.draw(st.integers(0, len(row)))
    start = data.draw(st.integers(0, 3))
    row.fill(start + count - 1 if count else -1)
    row[:count] = np.arange(start, start + count)
    return [place < count for place in range(len(row))]


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
        assert all((state == 0.5).all() for state in states_of(runner, artifact).values())
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
