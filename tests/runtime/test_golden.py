# SPDX-License-Identifier: Apache-2.0
"""Golden tokens are those of the whole model, however an artifact's ranks share it."""

from __future__ import annotations

from helpers import tiny_config
from torch import nn

from optimum_neuron.runtime import golden
from optimum_neuron.step.model_spec import ModelSpec


def test_how_ranks_add_up_changes_no_golden_token(
    tiny_models: dict[str, nn.Module], tiny_specs: dict[str, ModelSpec]
) -> None:
    model, spec = tiny_models["llama"], tiny_specs["llama"]
    expected = golden.record(model, tiny_config(target="hlo"), spec)
    shared = tiny_config(target="hlo", tensor_parallel_size=2, float32_reduce=True)
    assert golden.record(model, shared, spec) == expected
