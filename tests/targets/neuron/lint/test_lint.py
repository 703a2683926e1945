# SPDX-License-Identifier: Apache-2.0
"""Each rule of the lint finds a graph that breaks it, names the place, and lets the graphs of our models pass."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from broken_graphs import BROKEN, called, edited, enlarge, first, floats, indices, of_type, small
from lowered import lower_function

from optimum_neuron.config import HLO_TARGETS
from optimum_neuron.targets.neuron.graphs import hlo
from optimum_neuron.targets.neuron.graphs.io import LoweredGraph, read_graph_io, read_hlo
from optimum_neuron.targets.neuron.lint.lint import RULES, RULES_VERSION, Finding, lint, passed_rules
from optimum_neuron.targets.neuron.lint.operator_rules import TOPK_CALL, normalize_operators
from optimum_neuron.targets.neuron.lowering.split_tokens import SumsRule, is_split
from optimum_neuron.targets.neuron.operators import collectives
from optimum_neuron.targets.neuron.sdk.hardware import chip_of


def findings(graph: LoweredGraph, target: str = "trn2", operators: frozenset[str] | None = None) -> list[Finding]:
    return lint(graph.name, graph.hlo, graph.io, target, operators)


def rules(graph: LoweredGraph, target: str = "trn2") -> set[str]:
    return {finding.rule for finding in findings(graph, target)}


# Slow, or not documented: rules that do not stop an export.
WARNINGS = {"opcode", "scores", "copied-codes"}


@pytest.mark.parametrize("name", BROKEN)
def test_a_rule_finds_what_breaks_it(name: str) -> None:
    rule, graph, fragment = BROKEN[name]
    broken = [finding for finding in findings(graph()) if finding.rule == rule]
    assert any(fragment in str(finding) for finding in broken), broken
    assert all(finding.remedy and finding.problem for finding in broken)
    assert {finding.severity for finding in broken} == {"warning" if rule in WARNINGS else "error"}
    assert rule in WARNINGS or rule not in passed_rules(broken)


def test_every_rule_has_a_graph_that_breaks_it_and_a_source() -> None:
    # A weight that is transposed takes a model: test_weight_layout.py.
    assert {broken.rule for broken in BROKEN.values()} == {rule.name for rule in RULES} - {"transposed-weight"}
    assert all(rule.check.__doc__ for rule in RULES)


def test_rules_that_no_finding_breaks_have_passed() -> None:
    names = tuple(rule.name for rule in RULES)
    assert passed_rules(findings(small())) == names
    assert passed_rules(findings(BROKEN["sort"].graph())) == tuple(name for name in names if name != "sort")
    assert passed_rules(findings(BROKEN["undocumented"].graph())) == names  # a warning


def test_a_change_of_the_rules_is_a_new_version() -> None:
    """Of names alone: whoever changes what a rule finds raises the version too."""
    digest = hashlib.sha256(" ".join(rule.name for rule in RULES).encode()).hexdigest()
    assert {RULES_VERSION: digest[:8]} == {9: "412e951c"}


def test_a_small_top_k_needs_no_sort_and_the_call_that_the_sdk_emits_passes() -> None:
    for k, which in product((1, 16), (0, 1)):
        assert not rules(lower_function(lambda x, k=k, which=which: x.topk(k)[which].float(), [floats(2, 40)]))
    assert not rules(called(TOPK_CALL, floats(40), 8)()) - {"alias"}


REFUSED_BY = {
    "float64": "trn2", "complex64": "trn3", "int64": "trn1", "uint64": "trn3", "float8_e4m3fnuz": "trn3", "float8_e4m3fn": "trn1 trn2",
    "float8_e4m3": "trn3",
}  # fmt: skip
TAKEN_BY = {"float8_e4m3fn": "trn3", "float8_e4m3": "trn2", "bfloat16": "inf2"}


def test_types_by_target() -> None:
    for types, refused in ((REFUSED_BY, True), (TAKEN_BY, False)):
        for name, targets in types.items():
            graph = edited(small(), lambda module, name=name: of_type(name)(first(module, "add")))
            for target in targets.split():
                assert ("type" in rules(graph, target)) == refused, (name, target)
    # Weights of fp8 are taken: before trn3 the compiler is told.
    codes = torch.ones(4, 3).to(torch.float8_e4m3fn)
    graph = lower_function(lambda x, codes: x @ codes.float(), [floats(2, 4), codes])
    assert not [target for target in HLO_TARGETS if "type" in rules(graph, target)]


def test_weights_that_no_core_holds() -> None:
    graph = edited(small(), enlarge(20))
    large = [finding for finding in findings(graph, "inf2") if finding.rule == "memory"]
    assert "20.0 GiB of weights, KV cache and results for a core of 16 GiB" in str(large[0])
    assert "memory" not in rules(graph, "trn2") and "memory" not in rules(graph, "hlo")


@pytest.fixture(scope="module")
def decodes(hlo_artifact: Callable[[str], Path]) -> LoweredGraph:
    path = hlo_artifact("llama") / "graphs" / "token_generation_context64.hlo"
    return LoweredGraph(path.stem, "token_generation", read_hlo(path), read_graph_io(path))


def test_every_state_is_updated_in_place_exactly_once(decodes: LoweredGraph) -> None:
    edits: dict[str, Callable[[Any], None]] = {
        "is not updated in place": lambda entries: entries.pop(),
        "share the memory": lambda entries: entries.add().CopyFrom(entries[0]),
        "MUST_ALIAS": lambda entries: setattr(entries[0], "kind", 1),
        "another shape or type": lambda entries: entries[0].output_shape_index.__setitem__(0, 0),
    }
    assert not findings(decodes)
    for fragment, edit in edits.items():
        changed = edited(decodes, lambda module, edit=edit: edit(module.input_output_alias.entries))
        assert any(fragment in str(each) for each in findings(changed) if each.rule == "alias"), fragment


def test_collectives_take_all_ranks_and_floats() -> None:
    graph = lower_function(lambda x: collectives.all_reduce(x, 4), [floats(3)], world_size=4)
    assert not rules(graph)
    fewer = dataclasses.replace(graph, io=dataclasses.replace(graph.io, world_size=2))
    assert "collective" in rules(fewer)
    integers = lower_function(lambda x: collectives.all_reduce(x, 4), [indices(1, 2)], world_size=4)
    assert "integer-compute" in rules(integers)
    # So do sums of parts of the tokens.
    sums = SumsRule(chip_of("trn2"), (), split=True)
    for dtype, refused in {torch.float32: False, torch.int32: True}.items():
        x = torch.ones(1, 8, 4, dtype=dtype)
        graph = lower_function(lambda x: torch.abs(collectives.all_reduce(x, 4)), [x], 4, sums)
        assert is_split(graph.hlo) and ("integer-compute" in rules(graph)) == refused


def test_the_compilers_own_list_decides_where_there_is_one(decodes: LoweredGraph) -> None:
    used = {each.opcode for _, each in hlo.instructions(hlo.parse(decodes.hlo))}
    assert not findings(decodes, operators=normalize_operators(used))
    without = findings(decodes, operators=normalize_operators(used - {"logistic"}))
    assert {(finding.rule, finding.severity) for finding in without} == {
        ("opcode", "warning")
    }  # their own graphs have it
    unknown = findings(lower_function(torch.erf, [floats(3)]), operators=normalize_operators(used))
    assert {(finding.rule, finding.severity) for finding in unknown} == {("opcode", "error")}
    assert "does not list logistic" in str(without[0]) and "mlp" in without[0].module
    old_names = normalize_operators(["Mul", "DotGeneral", "ConvertElementType", "AllReduce", "Le"])
    assert {"multiply", "dot", "convert", "allreduce", "compare"} <= old_names


def test_bytes_that_are_no_module_are_refused(decodes: LoweredGraph) -> None:
    for data in (b"", b"not a module", decodes.hlo[:1000]):
        with pytest.raises(ValueError, match="no HLO module"):
            lint("graph", data, decodes.io, "trn2")
