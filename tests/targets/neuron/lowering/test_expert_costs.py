# SPDX-License-Identifier: Apache-2.0
"""The lint reads from a graph in which form its experts are computed, and counts every layer of a kind."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch
from expert_layers import call_of, weights_of
from helpers import tiny_config
from lowered import lower_function
from torch import Tensor

from optimum_neuron.step.spec import graph_specs
from optimum_neuron.targets.neuron.expert_forms import ExpertForm, ExpertLayer, all_experts, work
from optimum_neuron.targets.neuron.graph_io import GraphIO
from optimum_neuron.targets.neuron.lint.expert_costs import expert_costs
from optimum_neuron.targets.neuron.lowering import hlo
from optimum_neuron.targets.neuron.lowering.experts import in_form
from optimum_neuron.targets.neuron.sdk.hardware import CHIPS


TOKENS, EXPERTS, PER_TOKEN, HIDDEN, INNER = 40, 8, 3, 64, 40
NAMES = (
    "hidden",
    "index",
    "weights",
    *(f"model.{layer}.{part}_proj.order_0_1_2" for layer in "ab" for part in ("gate_up", "down")),
)
# Parts that are not of one size among them.
FORMS = {
    "all": all_experts(TOKENS),
    "gather": ExpertForm(0, TOKENS * PER_TOKEN, 1, 50),
    "blocks": ExpertForm(4, 29, 4, 12),
}


def step_of(form: ExpertForm) -> tuple[bytes, GraphIO]:
    """Two layers, as the graph of a step has them: their weights are its weights, by name."""

    def function(hidden: Tensor, index: Tensor, weights: Tensor, *layers: Tensor) -> Tensor:
        for tensors in (layers[:2], layers[2:]):
            hidden = in_form(call_of(hidden, index, weights, tensors, transposed=True), form)
        return hidden

    tensors = (
        *weights_of(EXPERTS, HIDDEN, INNER, transposed=True),
        *weights_of(EXPERTS, HIDDEN, INNER, transposed=True),
    )
    index = torch.zeros(TOKENS, PER_TOKEN, dtype=torch.int64)
    graph = lower_function(function, [torch.zeros(TOKENS, HIDDEN), index, torch.zeros(TOKENS, PER_TOKEN), *tensors])
    module = hlo.parse(graph.hlo)
    inputs = []
    for parameter, each in zip(hlo.parameters(module), graph.io.inputs, strict=True):
        name = NAMES[int(each.name.removeprefix("x."))]
        parameter.name = name
        inputs.append(replace(each, name=name, role="weight" if name.startswith("model.") else "input"))
    config = tiny_config(prefill_chunk_size=TOKENS, sequence_length=80, context_buckets=(80,), ctx_batch_size=1)
    spec = next(each for each in graph_specs(config) if each.kind == "chunked_prefill")
    assert spec.tokens == TOKENS
    return hlo.serialize(module), replace(graph.io, inputs=tuple(inputs), spec=asdict(spec))


@pytest.mark.parametrize("name", FORMS)
def test_form_and_work_are_those_of_all_layers(name: str) -> None:
    form, (data, io) = FORMS[name], step_of(FORMS[name])
    (found,) = expert_costs("step", data, io, "trn2")
    # Of a graph that computes all experts nobody can tell how many a token is routed to.
    layer = ExpertLayer(EXPERTS, 0 if name == "all" else PER_TOKEN, HIDDEN, 2 * INNER, INNER, "float32", 4)
    assert (found.layer, found.layers, found.tokens, found.form) == (layer, 2, TOKENS, form)
    before, after = (work(layer, TOKENS, each, CHIPS["trn2"]).times(2) for each in (all_experts(TOKENS), form))
    assert (found.before, found.after) == (before, after) and (before == after) == (name == "all")
    assert expert_costs("function", data, replace(io, spec=None), "trn2") == []
