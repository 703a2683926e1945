# SPDX-License-Identifier: Apache-2.0
"""The fake compiler refuses, by the codes that the lint names, what the lint refuses; and takes what the lint lets pass."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from broken_graphs import BROKEN, small
from fakes.plugin import SITE
from fakes.tools import NeuronTools

from optimum_neuron.targets.neuron.compile.compiler import compile_graphs
from optimum_neuron.targets.neuron.lint.lint import RULES


sys.path.append(str(SITE / "device"))
from fake_neuron.verifier import verify


pytest_plugins = ("fakes.plugin",)
CODES = {rule.name: rule.code for rule in RULES}
# Nothing fails: the compiler takes these, and the device runs them.
SILENT = {
    "opcode", "strided-store", "unsigned", "constant", "mask-sum", "flat-split", "dead-operand", "collective", "scores", "binding",
    "scaled-weight", "coded-state",
}  # fmt: skip
# What is wrong with it stands in its description alone.
SILENT_GRAPHS = {"a state without update"}


def codes(rule: str) -> set[str]:
    """The compiler's codes of a rule; "EVRF060-063" are four."""
    found = set()
    for prefix, begin, end in re.findall(r"\b(E[A-Z]{3})(\d{3})(?:-(\d{3}))?", CODES[rule]):
        found |= {f"{prefix}{number:03}" for number in range(int(begin), int(end or begin) + 1)}
    return found


@pytest.mark.parametrize("name", BROKEN)
def test_the_compiler_refuses_what_the_lint_does(name: str) -> None:
    broken = BROKEN[name]
    refused = {code for code, _ in verify(broken.graph().hlo, "trn2")}
    if broken.rule in SILENT or name in SILENT_GRAPHS:
        assert not refused
    else:
        assert refused & codes(broken.rule)


def test_a_refusal_names_the_rule_and_the_remedy(neuron_tools: NeuronTools, tmp_path: Path) -> None:
    compile_graphs([small()], "trn2", tmp_path)
    with pytest.raises(RuntimeError, match=r"(?s)NCC_EVRF029.*a sort is not supported.*optimum-cli neuron lint"):
        compile_graphs([BROKEN["sort"].graph()], "trn2", tmp_path)
