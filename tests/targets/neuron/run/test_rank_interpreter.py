# SPDX-License-Identifier: Apache-2.0
"""Ranks in an interpreter of their own, which has numpy and a runtime and no torch; and what is said of one that cannot hold a rank."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import fakes
import numpy as np
import pytest
import torch
from fakes.graphs import copy_graph, swap_graph
from fakes.tools import Sdk, children, make_plan
from helpers import read_state, run_tensors, write_state

from optimum_neuron import NeuronModelForCausalLM
from optimum_neuron.artifact.artifact import Artifact
from optimum_neuron.targets import RankOptions, get_target
from optimum_neuron.targets.neuron.graphs.io import DTYPES, NARROW
from optimum_neuron.targets.neuron.run import rank_process, ranks
from optimum_neuron.targets.neuron.run.load_plan import LoadPlan
from optimum_neuron.targets.neuron.run.rank_process import OLDEST_PYTHON, RANK_FOLDER, find_interpreter
from optimum_neuron.targets.neuron.run.ranks import RankedExecutable
from optimum_neuron.targets.neuron.sdk.errors import NeuronRuntimeError


pytest_plugins = ("fakes.plugin",)
SITE = Path(fakes.__file__).parent / "site"


def make_environment(folder: Path, *paths: Path, numpy: bool = True) -> str:
    """The interpreter of a new environment, which has numpy, if at all, and what is in `paths`, and nothing else."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    if numpy:
        installed = Path(np.__file__).parent
        for found in installed.parent.glob("numpy*"):
            (site / found.name).symlink_to(found)
    (site / "fakes.pth").write_text("\n".join(map(str, paths)) + "\n")
    return str(folder / "bin" / "python")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_environment(tmp_path_factory.mktemp("bare") / "env", SITE / "device", SITE / "nrt")


@pytest.fixture
def plan(neuron_sdk: Sdk, tmp_path: Path) -> LoadPlan:
    """A graph of two ranks, for a machine whose own Python has no runtime."""
    neuron_sdk("trn2")
    return make_plan(tmp_path / "graphs", [copy_graph(ranks=2)], "trn2", {}, {})


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    before = children()
    yield
    assert children() == before


def script(folder: Path, text: str) -> str:
    """A program that may stand where an interpreter should; `$PYTHON` and `$1` to `$5` are for it to use."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\nPYTHON={sys.executable}\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(("target", "packages"), [("trn3", ()), ("trn2", ("nxd",))])
def test_weights_states_inputs_and_outputs_of_every_type_pass_unchanged_where_one_runtime_has_numpy_alone(
    target: str, packages: tuple[str, ...], neuron_sdk: Sdk, tmp_path: Path, bare: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    neuron_sdk(target, *packages)
    if not packages:
        monkeypatch.setenv("OPTIMUM_NEURON_RANK_PYTHON", bare)
    names = [each for each in DTYPES if each not in NARROW]  # all that a graph may have
    assert {"bfloat16", "float16", "float8_e4m3fn", "int8", "uint8", "int16"} < {*names}
    numbers = torch.tensor([[[[0.0, 3.0]]], [[[5.0, 0.0]]], [[[7.0, 1.0]]]])
    values = {name: numbers.to(getattr(torch, name)) for name in names}
    weights = {f"model.of_{name}": each[:1] for name, each in values.items()}
    loaded = RankedExecutable(make_plan(tmp_path / "graphs", [swap_graph(name) for name in names], target, weights))
    guard = loaded._ranks[0].process.pid
    (held,) = Path(f"/proc/{guard}/task/{guard}/children").read_text().split()
    maps = Path(f"/proc/{held}/maps").read_text()
    assert "numpy" in maps and ("libtorch" in maps) == ("nxd" in packages) and (packages or "ml_dtypes" not in maps)
    for name, (weight, state, x) in ((name, each.split(1)) for name, each in values.items()):
        write_state(loaded, f"kv_cache.of_{name}", state)
        found = [*run_tensors(loaded, f"swap_{name}", [x]), read_state(loaded, f"kv_cache.of_{name}")]
        assert all(map(torch.equal, found, (state, weight, x, x))), name
        assert {each.dtype for each in found} == {x.dtype}
    loaded.close()


def test_what_runs_there_imports_nothing_but_the_standard_library_numpy_and_the_runtimes() -> None:
    known = sys.stdlib_module_names | {"numpy", "nrtpy", "torch", "neuronx_distributed", "torch_neuronx"}
    for path in RANK_FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                names = [] if node.level == 1 else ["." * node.level + str(node.module)]
            else:
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert {name.partition(".")[0] for name in names} <= known, path
    # One that is too old can still say so.
    ast.parse((RANK_FOLDER / "__main__.py").read_text(encoding="utf-8"), feature_version=(3, 4))
    assert OLDEST_PYTHON == (3, 10)


NO_PYTHON = "as no Python does; name the Python"
LATE = "did not say within 1 s what it has; name the Python"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"OPTIMUM_NEURON_RANK_PYTHON=.*/python: there is no such program; name the Python of an env"),
        ('echo \'{"python": "3.8.18"}\'', r"is Python 3\.8\.18, and a rank needs 3\.10 or later; name the Python"),
        ("echo hello", f"answered 'hello', {NO_PYTHON}"),
        ("true", f"answered '', {NO_PYTHON}"),
        ('echo \'{"python": "3.12.1"}\'', rf'3\.12\.1"}}., {NO_PYTHON}'),
        ('echo \'{"python": "3.12.1", "numpy": "2", "numpy_problem": 0, "torch": 0, "packages": {}}\'', NO_PYTHON),
        ("echo no libc >&2; exit 3", r"ended with status 3 \(no libc\); name the Python of an environment"),
        ("yes >&2", f"wrote more than 1,048,576 bytes, {NO_PYTHON}"),
        ("exec >&- 2>&-; sleep 600", LATE),
    ],
)
def test_a_program_that_is_no_interpreter_for_ranks_is_refused_in_one_sentence(
    text: str | None, message: str, plan: LoadPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_process, "_ANSWER_TIMEOUT", 1.0 if text is not None and "sleep" in text else 60.0)
    monkeypatch.setenv(
        "OPTIMUM_NEURON_RANK_PYTHON", str(tmp_path / "python") if text is None else script(tmp_path, text)
    )
    with pytest.raises(RuntimeError, match=message) as error:
        RankedExecutable(plan)
    assert "\n" not in str(error.value)


def test_an_interpreter_without_numpy_or_runtime_is_refused(
    plan: LoadPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(np.__file__).parents[1]))  # of this interpreter, hence not passed on
    python = make_environment(tmp_path / "empty", numpy=False)
    with pytest.raises(
        RuntimeError, match=r"without a numpy that works \(No module named 'numpy'\), .* -m pip install"
    ):
        RankedExecutable(plan, RankOptions(python))
    python = make_environment(tmp_path / "numpy")
    assert find_interpreter(python)[1].torch is None
    with pytest.raises(
        RuntimeError, match=r"nothing in .*/numpy/bin/python can run graphs on trn2: nrtpy is not inst"
    ):
        RankedExecutable(plan, RankOptions(python))


SERVE = 'if [ "$3" = probe ]; then exec {bare} "$@"; fi\n'
WRITE = "exec $PYTHON -c 'import os, sys, time; os.write(int(sys.argv[1]), b\"{}\"); time.sleep(600)' $4"


@pytest.mark.parametrize(
    ("serve", "message"),
    [
        (
            "echo out of luck >&2; exit 5",
            r"loading the model failed: the process of rank \d of 2 ended with status 5; load",
        ),
        (WRITE.format("y" * 99), r"rank \d of 2 answered what no rank says \(a message cannot begin with b'yyyy"),
        (WRITE.format("RANK"), r"the model failed: rank \d of 2.* did not answer within 3 s; load the model again"),
    ],
)
def test_a_process_that_dies_at_its_start_or_writes_something_else_is_told(
    serve: str, message: str, plan: LoadPlan, tmp_path: Path, bare: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "_LOAD_TIMEOUT", 3.0 if "RANK" in serve else 60.0)
    monkeypatch.setattr(ranks, "GRACE", 0.5)
    python = script(tmp_path, SERVE.format(bare=bare) + serve)
    with pytest.raises(NeuronRuntimeError, match=message):
        RankedExecutable(plan, RankOptions(python))


@pytest.mark.parametrize("target", ["cpu", "eager", "hlo"])
def test_options_of_ranks_are_refused_where_there_are_none(target: str, hlo_artifact: Callable[[str], Path]) -> None:
    path = hlo_artifact("llama")
    for option, given in (("rank_python='x'", RankOptions("x")), ("rank_timeout=3.0", RankOptions(timeout=3.0))):
        told = f"{option} is for .* and an artifact for hlo runs in this one"
        with pytest.raises(ValueError, match=told):
            get_target(target).load(Artifact.open(path), trust_native_code=True, trust_remote_code=False, ranks=given)
        with pytest.raises(ValueError, match=told):
            NeuronModelForCausalLM.from_pretrained(path, rank_python=given.python, rank_timeout=given.timeout)
