# SPDX-License-Identifier: Apache-2.0
"""Ranks add their partial sums in the model's type, or in float32 where that was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import tiny_config
from tiny import TINY_CONFIGS

from optimum_neuron.targets.neuron.graphs import hlo
from optimum_neuron.targets.neuron.lint.cost import graph_cost
from optimum_neuron.targets.neuron.lowering.lower_all import lower_all


@pytest.mark.parametrize(("float32", "dtype", "size"), [(False, "bfloat16", 2), (True, "float32", 4)])
def test_layers_are_summed_in_the_type_that_was_asked_for(
    float32: bool, dtype: str, size: int, tmp_path: Path
) -> None:
    TINY_CONFIGS["llama"]().save_pretrained(tmp_path)
    config = tiny_config(
        target="trn2",
        tensor_parallel_size=2,
        dtype="bfloat16",
        float32_reduce=float32,
        mixed_step=False,
        on_device_sampling=False,
    )
    for graph in lower_all(tmp_path, config, {}, trust_remote_code=False):
        if graph.kind != "token_generation":
            continue
        reduces = [each for _, each in hlo.instructions(hlo.parse(graph.hlo)) if each.opcode == "all-reduce"]
        # That of the embedding adds zeros to one rank's row, which no type rounds.
        assert [hlo.dtype_name(each.shape) for each in reduces] == ["bfloat16", *(dtype,) * 4]
        found, rows = graph_cost(graph.name, graph.hlo, graph.io, "trn2"), 3 * 64
        assert found.collectives["all-reduce"] == 5
        gathered = found.collective_bytes - 2 * rows - 4 * size * rows
        assert gathered in (3 * 300, 2 * 3 * 300)  # half of the logits
