# SPDX-License-Identifier: Apache-2.0
"""The kernels import nothing of the package outside of themselves, and work without it."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
from helpers import python_process

from optimum_neuron.kernels.host import native_build
from optimum_neuron.kernels.host.instruction_sets import choose_instruction_set
from optimum_neuron.kernels.run import encode_products, short_scales
from optimum_neuron.step.features.codes.weight import MEET_CODED, UNUSED_SCALE_BITS
from optimum_neuron.targets.cpu.native_library import fetch_library


PACKAGE = Path(native_build.__file__).parents[2]
ALONE = """
import sys, types
from pathlib import Path

folder = Path(sys.argv[2])

class Rest:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("optimum_neuron.") and name.split(".")[1] != "kernels":
            raise ImportError(name)

sys.meta_path.insert(0, Rest())
package = types.ModuleType("optimum_neuron")
package.__path__ = [sys.argv[1]]
sys.modules["optimum_neuron"] = package

import torch
from optimum_neuron.kernels.host.native_build import load_library
from optimum_neuron.kernels.lower.lower import lower
from optimum_neuron.kernels.plan import TensorSize, Plan
from optimum_neuron.kernels.run.memory import allocate_arena

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(5, 16))
        self.register_buffer("table", torch.randn(4, 16))

    def forward(self, x, index):
        hidden = torch.nn.functional.gelu(x * 2 + self.table[index])
        return torch.nn.functional.linear(hidden, self.weight).softmax(-1)

def check_made_for(found):
    if found != {"graph": "alone"}:
        raise ValueError(found)

x, index = torch.randn(3, 16), torch.tensor([3, 0, 2])
model = Model()
with torch.no_grad():
    expected = model(x, index)
    program = torch.export.export(model, (x, index))
tensors = {name: each.detach().numpy() for name, each in model.state_dict().items()}
plan, constants = lower(program, tokens=3, by_token=["0"])
plan.save(folder / "plan.json", {"graph": "alone"}, tensors)
loaded = Plan.load(folder / "plan.json", tensors, check_made_for)
assert loaded == plan and any(step.tokens for step in plan.steps)
known = tensors | {name: each.numpy() for name, each in constants.items()}
loaded.check(known)
forms = [TensorSize("float32", (3, 16)), TensorSize("int64", (3,))], [TensorSize("float32", (3, 5))]
bound = loaded.bind(known, *forms, allocate_arena([loaded]), library=load_library(), threads=lambda: 1)
for live in (3, 2):
    (found,) = bound.run([x.numpy(), index.numpy()], live)
    torch.testing.assert_close(torch.from_numpy(found[:live]), expected[:live])
print("runs")
"""
# Plays a C++ compiler: notes each source, and links to a library that was built before.
COMPILER = """#!/bin/sh
for last; do :; done
case "$*" in
*-shared*) cp "{library}" "$last" ;;
*) touch "$last" && echo "$*" >> "{log}" ;;
esac
"""


def test_kernels_are_built_and_plans_are_made_kept_checked_and_run_without_the_rest_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = fetch_library(tmp_path / "kernels.so", choose_instruction_set())
    compiler = tmp_path / "c++"
    compiler.write_text(COMPILER.format(library=library, log=tmp_path / "log"), encoding="ascii")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    output, errors = python_process(ALONE, PACKAGE, tmp_path).communicate(timeout=200)
    assert output == "runs\n", errors
    built = {Path(line.split(" -c ")[1].split()[0]) for line in (tmp_path / "log").read_text().splitlines()}
    assert built == set(native_build.list_sources())


def test_each_source_finds_what_it_includes_and_is_included_or_compiled() -> None:
    sources = {path.relative_to(native_build.SOURCES).as_posix() for path in native_build.SOURCES.rglob("*.*")}
    included = set()
    for name in sources:
        for line in (native_build.SOURCES / name).read_text(encoding="utf-8").splitlines():
            if line.startswith('#include "'):
                included.add(line.split('"')[1])
    assert included == {name for name in sources if name.endswith(".h")}


def test_constants_that_the_step_has_too_are_equal() -> None:
    assert encode_products.MEET_CODED == MEET_CODED
    assert short_scales.UNUSED_SCALE_BITS == UNUSED_SCALE_BITS


def test_a_wheel_is_built_by_pythons_own_library_alone() -> None:
    for path in (PACKAGE / "kernels" / "host").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names.append(node.module or "")
            assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names, path
