# SPDX-License-Identifier: Apache-2.0
"""The modules of `neuron golden` are graphs that the compiler's documented interface takes, and lint finds nothing in them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.tools import NeuronTools

from optimum_neuron.config import NeuronConfig
from optimum_neuron.targets.neuron.lint.lint import lint
from optimum_neuron.tools.golden import write
from optimum_neuron.tools.golden.modules import MODELS, RUNS, SHOWS, SIZES, GoldenRun
from optimum_neuron.tools.golden.read import read_result


pytest_plugins = ("fakes.plugin",)


def test_every_run_has_a_model_and_a_config_of_its_own() -> None:
    assert len(SHOWS) == sum(len(run.modules) for run in RUNS) >= 20
    assert {run.model for run in RUNS} == MODELS.keys()
    for run in RUNS:
        NeuronConfig.from_dict({**SIZES, **run.options, "target": "trn2"})


@pytest.mark.parametrize(
    "name", ["latent", *(pytest.param(run.name, marks=pytest.mark.full) for run in RUNS if run.name != "latent")]
)
def test_modules_compile_by_their_own_script(
    name: str, neuron_tools: NeuronTools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "RUNS", [run for run in RUNS if run.name == name])
    names = write.write_golden(tmp_path / "golden", "trn2")
    command = [sys.executable, str(tmp_path / "golden/run_compiler.py")]
    subprocess.run(command, env=os.environ, check=True, timeout=300)
    found = read_result(tmp_path / "golden/result.json")["modules"]
    assert {name: each["outcome"] for name, each in found.items()} == dict.fromkeys(names, "compiled")
    with pytest.raises(FileExistsError, match="name a new folder"):
        write.write_golden(tmp_path / "golden", "trn2")


@pytest.mark.full
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_lint_finds_no_error(run: GoldenRun) -> None:
    for name, graph in write._lower(run, "trn2"):
        assert [each for each in lint(name, graph.hlo, graph.io, "trn2") if each.severity == "error"] == []
