# SPDX-License-Identifier: Apache-2.0
"""A sampler runs after a step where a row in use is to be drawn, and after no other step."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import tiny_config

from optimum_neuron.step.spec import GREEDY, GraphSpec, SamplingParams, graph_specs
from optimum_neuron.targets.neuron.graphs.io import SAMPLERS, GraphIO, OutputBinding
from optimum_neuron.targets.neuron.run.executors import AheadExecutable


CONFIG = tiny_config(target="hlo", output_logits=True)
MIXED = next(graph for graph in graph_specs(CONFIG) if graph.kind == "mixed")
SAMPLED = SamplingParams(5, 0.9, 0.7)


class Step:
    """A step whose rows are greedy, and what follows it."""

    def __init__(self, spec: GraphSpec) -> None:
        self.inputs = {each.name: np.zeros(each.shape, each.dtype) for each in spec.inputs()}
        for name, array in self.inputs.items():
            if name.endswith("sampling_params"):
                array[:] = GREEDY
        outputs = [OutputBinding(each.name, each.shape, each.dtype, None) for each in spec.outputs(300)]
        states = (OutputBinding("scores.decode", (1, 1), "float32", "scores.decode"),)
        io = GraphIO((), (*states, *outputs), (), "0" * 64, 1)
        self.name, self._executable = spec.name, AheadExecutable({spec.name: io}, {spec.name: list(self.inputs)})

    def due(self) -> dict[str, tuple[int, list[np.ndarray]]]:
        """By sampler the number of the output that it replaces, and its inputs."""
        found = self._executable.find_due(self.name, list(self.inputs.values()))
        return {draw.graph: (draw.tokens, taken) for draw, taken in found}


def test_each_group_has_a_sampler_that_gives_its_tokens_and_is_told_whose_token_each_row_draws() -> None:
    step = Step(MIXED)
    for group in SAMPLERS:
        step.inputs[f"{group}.sampling_params"][:] = SAMPLED
    step.inputs["decode.position_ids"][:] = [[4], [-1], [0]]
    step.inputs["chunk.position_ids"][1] = -1
    step.inputs["chunk.seq_ids"][:] = [2, 1]
    found, outputs = step.due(), [each.name for each in MIXED.outputs(300)]
    assert {graph: outputs[number] for graph, (number, _) in found.items()} == {
        graph: f"{group}.tokens" for group, graph in SAMPLERS.items()
    }
    params, uniforms, slots = found[SAMPLERS["chunk"]][1]
    assert params is step.inputs["chunk.sampling_params"] and uniforms is step.inputs["chunk.uniforms"]
    assert slots.tolist() == [2, -1] and found[SAMPLERS["decode"]][1][2].tolist() == [0, -1, 2]


@pytest.mark.parametrize("group", ["decode", "chunk"])
def test_a_greedy_step_runs_none_and_a_row_in_use_that_is_drawn_runs_its_own(group: str) -> None:
    step = Step(MIXED)
    assert not step.due()
    step.inputs[f"{group}.sampling_params"][1] = SAMPLED
    assert step.due().keys() == {SAMPLERS[group]}
    step.inputs[f"{group}.position_ids"][1] = -1  # an idle row
    assert not step.due()
    step.inputs["decode.sampling_params"][:, 2] = np.nan  # is greedy, as in the sampler
    assert not step.due()


def test_where_the_host_chooses_no_sampler_follows() -> None:
    for spec in graph_specs(tiny_config(target="hlo", on_device_sampling=False)):
        assert not Step(spec).due()
