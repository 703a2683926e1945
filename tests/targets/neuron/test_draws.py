# SPDX-License-Identifier: Apache-2.0
"""A sampler runs after a step where a row in use is to be drawn, and after no other step."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import tiny_config

from optimum_neuron.step.spec import GREEDY, GraphSpec, SamplingParams, graph_specs
from optimum_neuron.targets.neuron.graphs.io import SAMPLERS, GraphIO, OutputBinding
from optimum_neuron.targets.neuron.run.executors import Draw, find_draws


CONFIG = tiny_config(target="hlo", output_logits=True)
MIXED = next(graph for graph in graph_specs(CONFIG) if graph.kind == "mixed")
SAMPLED = SamplingParams(5, 0.9, 0.7)


def _io(spec: GraphSpec) -> GraphIO:
    outputs = [OutputBinding(each.name, each.shape, each.dtype, None) for each in spec.outputs(300)]
    states = (OutputBinding("scores.decode", (1, 1), "float32", "scores.decode"),)
    return GraphIO((), (*states, *outputs), (), "0" * 64, 1)


def _step(spec: GraphSpec) -> tuple[tuple[Draw, ...], dict[str, np.ndarray]]:
    names = [each.name for each in spec.inputs()]
    inputs = {each.name: np.zeros(each.shape, each.dtype) for each in spec.inputs()}
    for name, array in inputs.items():
        if name.endswith("sampling_params"):
            array[:] = GREEDY
    return find_draws({spec.name: names}, {spec.name: _io(spec)})[spec.name], inputs


def test_each_group_has_a_sampler_that_gives_its_tokens() -> None:
    found, inputs = _step(MIXED)
    outputs = [each.name for each in MIXED.outputs(300)]
    assert [each.graph for each in found] == list(SAMPLERS.values())
    assert [outputs[each.tokens] for each in found] == ["decode.tokens", "chunk.tokens"]
    taken = found[1].take_inputs(list(inputs.values()))
    assert taken[0] is inputs["chunk.sampling_params"] and taken[1] is inputs["chunk.uniforms"]


def test_a_sampler_is_told_whose_token_each_row_draws() -> None:
    found, inputs = _step(MIXED)
    inputs["decode.position_ids"][:] = [[4], [-1], [0]]
    inputs["chunk.position_ids"][1] = -1
    inputs["chunk.seq_ids"][:] = [2, 1]
    slots = [each.take_inputs(list(inputs.values()))[2].tolist() for each in found]
    assert slots == [[0, -1, 2], [2, -1]]


@pytest.mark.parametrize("group", ["decode", "chunk"])
def test_a_greedy_step_runs_none_and_a_row_in_use_that_is_drawn_runs_its_own(group: str) -> None:
    found, inputs = _step(MIXED)
    assert not any(each.is_due(list(inputs.values())) for each in found)
    inputs[f"{group}.sampling_params"][1] = SAMPLED
    due = [each.graph for each in found if each.is_due(list(inputs.values()))]
    assert due == [SAMPLERS[group]]
    inputs[f"{group}.position_ids"][1] = -1  # an idle row
    assert not any(each.is_due(list(inputs.values())) for each in found)
    inputs["decode.sampling_params"][:, 2] = np.nan  # is greedy, as in the sampler
    assert not any(each.is_due(list(inputs.values())) for each in found)


def test_where_the_host_chooses_no_sampler_follows() -> None:
    for spec in graph_specs(tiny_config(target="hlo", on_device_sampling=False)):
        assert _step(spec)[0] == ()
