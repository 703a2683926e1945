# SPDX-License-Identifier: Apache-2.0
"""Loading several ranks tries every collective of their graphs, and finds one that the devices compute wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fakes.tools import Sdk, make_plan
from lowered import lower_function

from optimum_neuron.targets.neuron.graphs.io import PROBED, LoweredGraph
from optimum_neuron.targets.neuron.lint.lint import lint
from optimum_neuron.targets.neuron.lowering.probe import Collective, find_trials, lower_probe
from optimum_neuron.targets.neuron.operators.collectives import all_gather, all_reduce, reduce_scatter
from optimum_neuron.targets.neuron.run.ranks import RankedExecutable
from optimum_neuron.targets.neuron.sdk.errors import NeuronRuntimeError
from optimum_neuron.targets.neuron.sharding.plan import RANK_TENSOR


pytest_plugins = ("fakes.plugin",)
RANKS = 2
CALLS = {
    Collective("all-gather", "float32", (3, 7), 1): lambda x: all_gather(x, 1, RANKS),
    Collective("all-gather", "bfloat16", (1, 4, 300), 1): lambda x: all_gather(x, 1, RANKS),
    Collective("all-reduce", "bfloat16", (1, 4, 9), 0): lambda x: all_reduce(x, RANKS),
    Collective("reduce-scatter", "float32", (1, 4, 9), 1): lambda x: reduce_scatter(x, 1, RANKS),
}


def probe() -> LoweredGraph:
    graphs = [
        lower_function(call, [torch.zeros(trial.shape, dtype=getattr(torch, trial.dtype))], RANKS)
        for trial, call in CALLS.items()
    ]
    graph = lower_probe((trial for each in graphs for trial in find_trials(each.hlo)), RANKS)
    assert {each.name.removeprefix(PROBED) for each in graph.io.outputs} == set(map(str, CALLS))
    assert find_trials(graph.hlo) == CALLS.keys() and not lint(graph.name, graph.hlo, graph.io, "trn2")
    return graph


@pytest.mark.parametrize(("packages", "target", "who"), [("nrt", "trn2", "rank 0"), ("nxd", "inf2", "all 2 ranks")])
def test_a_collective_that_is_wrong_on_the_devices_is_found_at_load(
    packages: str, target: str, who: str, neuron_sdk: Sdk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    neuron_sdk(target, packages)
    numbers = [{RANK_TENSOR: torch.tensor([rank], dtype=torch.int32)} for rank in range(RANKS)]
    plan = make_plan(tmp_path / "graphs", [probe()], target, *numbers)
    RankedExecutable(plan).close()
    monkeypatch.setenv("FAKE_NEURON_NARROW", "1024")
    told = rf"the devices gave {who}.* 21 wrong numbers from an all-gather of float32 \[3, 7\] along 1; .* on one"
    with pytest.raises(NeuronRuntimeError, match=told):
        RankedExecutable(plan)
