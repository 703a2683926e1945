# SPDX-License-Identifier: Apache-2.0
"""Loading and running NEFFs through each runtime, on fakes that execute the HLO."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.graphs import step_graph
from fakes.tools import NeuronTools, Sdk, cache_like, make_plan
from helpers import read_state, run_tensors, write_state
from safetensors.torch import save_file
from torch import Tensor

from optimum_neuron.targets import Executable
from optimum_neuron.targets.neuron.graphs.io import LoweredGraph
from optimum_neuron.targets.neuron.rank.packages import NEURONX_DISTRIBUTED, NRTPY, TORCH_NEURONX, package_problem
from optimum_neuron.targets.neuron.run.ranks import RankedExecutable
from optimum_neuron.targets.neuron.sdk.errors import NeuronRuntimeError


pytest_plugins = ("fakes.plugin",)
# Packages and target for each runtime.
RUNTIMES = {"nrtpy": ("nrt", "trn3"), "nxd": ("nxd", "trn1")}


@pytest.fixture
def load(neuron_sdk: Sdk, tmp_path: Path) -> Iterator[Callable[..., Executable]]:
    loaded: list[Any] = []

    def load_runtime(runtime: str, graphs: Sequence[LoweredGraph], weight: Tensor, **changes: Any) -> Executable:
        packages, target = RUNTIMES[runtime]
        neuron_sdk(target, packages)
        plan = make_plan(tmp_path / "graphs", graphs, target, {"model.weight": weight})
        loaded.append(RankedExecutable(replace(plan, **changes)))
        return loaded[-1]

    yield load_runtime
    for executable in loaded:
        executable.close()


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_graphs_compute_on_one_state_and_one_copy_of_the_weights_until_an_error_from_which_a_runtime_cannot_recover(
    load: Callable[..., Executable], runtime: str, neuron_tools: NeuronTools, tmp_path: Path
) -> None:
    graphs = [step_graph(), step_graph("token_generation_large"), step_graph("mixed")]
    # Inputs that a graph does not use are left out.
    path = tmp_path / "tied.safetensors"  # one tensor under two names
    save_file({"model.stored": cache_like(2.0, 3.0)}, path)
    tied = {"weights": (path,), "tied_weights": {"model.weight": "model.stored"}}
    loaded = load(runtime, graphs, cache_like(1.0, 1.0), calls={"mixed": ("decode.unused", "decode.x")}, **tied)
    assert torch.equal(read_state(loaded, "kv_cache.key_0"), cache_like(0.0, 0.0))
    x = cache_like(1.0, 10.0)
    (first,) = run_tensors(loaded, "token_generation", [x])
    (second,) = run_tensors(loaded, "mixed", [torch.zeros(3), x])
    assert torch.equal(first, cache_like(4.0, 60.0))
    assert torch.equal(second, cache_like(8.0, 120.0))
    assert torch.equal(read_state(loaded, "kv_cache.key_0"), cache_like(4.0, 60.0))
    write_state(loaded, "kv_cache.key_0", cache_like(1.0, 1.0))
    (third,) = run_tensors(loaded, "token_generation_large", [x])
    assert torch.equal(third, cache_like(6.0, 62.0))
    # Results are the caller's: the next step does not change them.
    assert torch.equal(first, cache_like(4.0, 60.0))
    neuron_tools.break_device(message="NRT Error NRT_EXEC_COMPLETED_WITH_NUM_ERR(1003): Failed to execute model")
    with pytest.raises(
        NeuronRuntimeError, match=r"graph mixed failed with .*\(1003\): the step produced NaN"
    ) as error:
        run_tensors(loaded, "mixed", [torch.zeros(3), x])
    assert error.value.recoverable and error.value.code == 1003
    (fourth,) = run_tensors(loaded, "token_generation", [x])
    assert torch.equal(fourth, cache_like(10.0, 122.0))
    neuron_tools.break_device(message="nrt_execute: status=101, execution unit unrecoverable")
    for _ in range(2):
        message = r"NRT_EXEC_UNIT_UNRECOVERABLE \(101\): .* load the model again"
        with pytest.raises(NeuronRuntimeError, match=message) as error:
            run_tensors(loaded, "token_generation", [x])
        assert not error.value.recoverable


def test_what_does_not_fit_is_refused_before_anything_is_loaded(
    load: Callable[..., Executable], neuron_sdk: Sdk, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"lacks model.weight, which a graph needs; export the model again"):
        load("nrtpy", [step_graph()], cache_like(1.0, 1.0), tied_weights={"model.weight": "model.other"})
    neuron_sdk("trn2", "nrt")
    plan = make_plan(tmp_path / "graphs", [step_graph()], "trn2", {"model.weight": cache_like(1.0, 1.0)})
    plan.neff("token_generation").unlink()
    with pytest.raises(FileNotFoundError, match=r"token_generation\.neff is missing: .*export the model again"):
        RankedExecutable(plan)


def test_a_package_that_does_not_start_is_explained(
    neuron_sdk: Sdk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site" / "nrtpy").mkdir(parents=True)
    source = "class NrtpyModel: ...\nraise ImportError('libnrt.so.1: cannot open shared object file')\n"
    (tmp_path / "site" / "nrtpy" / "__init__.py").write_text(source)
    neuron_sdk("trn2")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), os.environ["PYTHONPATH"]]))
    plan = make_plan(tmp_path / "graphs", [step_graph()], "trn2", {"model.weight": cache_like(1.0, 1.0)})
    with pytest.raises(NeuronRuntimeError, match=r"starting nrtpy failed: .*\(libnrt.so.1: .*aws-neuronx-runtime-lib"):
        RankedExecutable(plan)


def test_packages_are_told_from_placeholders_and_nothing_is_imported(
    neuron_sdk: Sdk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "is not installed" in (package_problem(TORCH_NEURONX) or "")
    (tmp_path / "site" / "torch_neuronx" / "native").mkdir(parents=True)
    (tmp_path / "site" / "torch_neuronx" / "__init__.py").write_text("")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(tmp_path / "site"))
        assert "has no xla_impl; upgrade" in (package_problem(TORCH_NEURONX) or "")
    neuron_sdk(None, "placeholder")
    for package in (TORCH_NEURONX, NRTPY):
        told = package_problem(package) or ""
        assert f"the installed {package.distribution} is a placeholder without code (" in told
    # This one installs no module of its name at all.
    assert "the installed neuronx-distributed is a placeholder without code;" in (
        package_problem(NEURONX_DISTRIBUTED) or ""
    )
    neuron_sdk(None, "nrt")
    assert package_problem(NRTPY) is None
    assert not {"torch_neuronx", "nrtpy"} & sys.modules.keys()
