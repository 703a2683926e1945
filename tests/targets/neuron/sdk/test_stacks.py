# SPDX-License-Identifier: Apache-2.0
"""Which versions go together: the table in NEURON.md is the data that a runtime is chosen by, and agrees with pyproject.toml."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest

from optimum_neuron.config import NEURON_TARGETS
from optimum_neuron.targets.neuron.rank.packages import RUNTIME_PACKAGES
from optimum_neuron.targets.neuron.sdk.stacks import STACKS, InstalledRuntimes, Stack, Versions, choose_runtime


ROOT = Path(__file__).parents[4]
NONE = {each.distribution: f"{each.distribution} is not installed" for each in RUNTIME_PACKAGES}


def tables() -> list[list[list[str]]]:
    """The rows of each table, without heads."""
    text = (ROOT / "NEURON.md").read_text(encoding="utf-8")
    found = re.findall(r"\n\|[^\n]*\n\|[-|]*\n((?:\|[^\n]*\n)+)", text)
    return [[[cell.strip() for cell in row.strip("|").split("|")] for row in each.splitlines()] for each in found]


def having(stack: Stack, python: str, torch: str | None) -> InstalledRuntimes:
    return InstalledRuntimes(python, torch, NONE | {each.distribution: None for each in stack.packages})


def test_the_document_has_the_data_that_a_runtime_is_chosen_by() -> None:
    assert tables()[0] == [
        [each.runtime, ", ".join(each.targets), str(each.python), str(each.torch or "none"), str(each.sdk)]
        for each in STACKS
    ]


def test_the_document_has_the_pins_of_this_package() -> None:
    pins = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (least,) = re.findall(r'requires-python = ">=([\d.]+)"', pins)
    first, last = re.findall(r'"torch>=([\d.]+),<2\.(\d+)"', pins)[0]
    (xla,) = re.findall(r'"torch-xla==([\d.]+)\.\*"', pins)
    (vllm,) = re.findall(r'"vllm>=([\d.]+),', pins)
    (tested,) = re.findall(r"^TORCH \?= (\d+\.\d+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert tables()[1] == [
        [f"export, lint, and target hlo (torch-xla {xla})", f"{least} or later", first],
        ["generate, engine, check", f"{least} or later", f"{first} to 2.{int(last) - 1}"],
        [f"vLLM {vllm}", "3.11 or later", tested],  # vLLM pins both
    ]


@pytest.mark.parametrize("stack", STACKS, ids=lambda stack: stack.runtime)
def test_every_row_is_chosen_for_its_targets_with_its_versions_and_refused_with_others(stack: Stack) -> None:
    torches = [None] if stack.torch is None else [f"{stack.torch.least}.0+cu128", f"{stack.torch.most}.1"]
    pythons = [f"{stack.python.least}.0", f"{stack.python.most}.9"]
    for target, python, torch in product(stack.targets, pythons, torches):
        assert choose_runtime(target, having(stack, python, torch), "x") == stack.runtime
    for target in set(NEURON_TARGETS) - set(stack.targets):
        with pytest.raises(RuntimeError, match=f"nothing in x can run graphs on {target}: nrtpy is not installed"):
            choose_runtime(target, having(stack, pythons[0], torches[0]), "x")
    for python in ("3.9.18", "3.15.0"):
        with pytest.raises(RuntimeError, match=f"{stack.runtime} needs Python {stack.python}, and this is {python}"):
            choose_runtime(stack.targets[0], having(stack, python, torches[0]), "x")
    for torch in () if stack.torch is None else (None, "2.8.0", "2.13.0+cpu"):
        with pytest.raises(
            RuntimeError, match=f"needs torch {stack.torch}, and there is {re.escape(torch or 'none')}"
        ):
            choose_runtime(stack.targets[0], having(stack, pythons[0], torch), "x")


def test_the_preferred_runtime_is_used_where_several_are_there() -> None:
    everything = InstalledRuntimes("3.12.1", "2.11.0", dict.fromkeys(NONE))
    assert {choose_runtime(target, everything, "x") for target in NEURON_TARGETS} == {"nrtpy"}
    old = InstalledRuntimes("3.10.1", "2.9.0", dict.fromkeys(NONE))
    assert {choose_runtime(target, old, "x") for target in ("inf2", "trn1", "trn2")} == {"neuronx-distributed"}


def test_versions_have_all_that_begins_like_them() -> None:
    versions = ("2.9.9", "2.10", "2.10.0", "2.12.9+cpu", "2.13.0", "3.0")
    assert [each for each in versions if each in Versions("2.10", "2.12")] == ["2.10", "2.10.0", "2.12.9+cpu"]
