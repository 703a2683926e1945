# SPDX-License-Identifier: Apache-2.0
"""A graph's inputs are set anew in every step, and its outputs are told by name, a row per chunk."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import VOCAB, random_tokens, tiny_config

from optimum_neuron.core import PromptPiece
from optimum_neuron.runtime.step_tensors import DecodeRows, StepGraph
from optimum_neuron.step.spec import graph_specs


SPECS = {spec.kind: spec for spec in graph_specs(tiny_config(ctx_batch_size=3))}


def rows_of(*slots: int) -> DecodeRows:
    active = np.isin(np.arange(3), slots)
    return DecodeRows(np.arange(5, 8, dtype=np.int32), active, np.zeros((3, 4), np.float32), np.zeros(3, np.float32))


@pytest.mark.parametrize("kind", ["token_generation", "mixed"])
def test_rows_of_the_step_before_are_idle_again(kind: str) -> None:
    spec = SPECS[kind]  # type: ignore[index]
    graph, lengths = StepGraph(spec, {}, None), np.array([4, 0, 9], np.int32).data
    names = [each.name for each in spec.inputs()]
    ids, positions = (graph.inputs[names.index(f"decode.{name}")][:, 0] for name in ("input_ids", "position_ids"))
    for slots, expected in (((0, 2), [4, -1, 9]), ((1,), [-1, 0, -1]), ((), [-1, -1, -1]), ((2,), [-1, -1, 9])):
        rows = rows_of(*slots)
        graph.fill_inputs((), rows, rows.list_slots(), lengths)
        assert positions.tolist() == expected
        assert [ids[slot].item() for slot in slots] == [5 + slot for slot in slots]
    graph.fill_inputs((), None, (), lengths)
    assert positions.tolist() == [-1, -1, -1]


@pytest.mark.parametrize("counts", [(3, 4, 2), (9, 1), (1, 13), (20,)])
def test_outputs_are_a_row_per_chunk_the_one_of_its_last_token(counts: tuple[int, ...]) -> None:
    spec = SPECS["mixed"]
    graph = StepGraph(spec, {}, None)
    chunks = [PromptPiece(slot, random_tokens(count)) for slot, count in enumerate(counts)]
    last_rows = graph.fill_inputs(chunks, None, (), np.zeros(3, np.int32).data)
    assert last_rows == (np.cumsum([-(-count // spec.chunk_size) for count in counts]) - 1).tolist()
    outputs = [np.empty(each.shape, each.dtype) for each in spec.outputs(VOCAB)]
    for number, output in enumerate(outputs):
        output[:] = np.arange(len(output)).reshape(-1, *[1] * (output.ndim - 1)) + 10 * number
    found = graph.name_outputs(outputs, last_rows)
    names = [each.name.replace(".", "_") for each in spec.outputs(VOCAB)]
    for name, value in found._asdict().items():
        expected = None if name not in names else outputs[names.index(name)]
        if expected is not None and name.startswith("chunk"):
            expected = expected[last_rows]
        assert value is expected is None or (value is not None and np.array_equal(value, expected))
    with pytest.raises(ValueError, match=f"returned {len(outputs) - 1} outputs, and has {len(outputs)}"):
        graph.name_outputs(outputs[:-1], last_rows)
