# SPDX-License-Identifier: Apache-2.0
"""Each rule of the lint finds a graph that breaks it, names the place, and lets the graphs of our models pass."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import ARCHITECTURES, tiny_config
from lowered import lower_function, lower_model
from torch import Tensor, nn

from optimum_neuron.config import HLO_TARGETS
from optimum_neuron.graphs import collectives
from optimum_neuron.targets.neuron.graph_io import GraphIO
from optimum_neuron.targets.neuron.lint.lint import Finding, lint
from optimum_neuron.targets.neuron.lint.operators import normalize_operators
from optimum_neuron.targets.neuron.lowering import hlo
from optimum_neuron.targets.neuron.lowering.lower import LoweredGraph


def findings(graph: LoweredGraph, target: str = "trn2", operators: frozenset[str] | None = None) -> list[Finding]:
    return lint(graph.name, graph.hlo, graph.io, target, operators)


def rules(graph: LoweredGraph, target: str = "trn2") -> set[str]:
    return {finding.rule for finding in findings(graph, target)}


def edited(graph: LoweredGraph, edit: Callable[[Any], None]) -> LoweredGraph:
    """The graph with its module changed by hand: for what no torch program lowers to."""
    module = hlo.parse(graph.hlo)
    edit(module)
    return dataclasses.replace(graph, hlo=hlo.serialize(module))


def first(module: Any, opcode: str) -> Any:
    return next(each for _, each in hlo.instructions(module) if each.opcode == opcode)


def floats(*shape: int) -> Tensor:
    return torch.ones(shape)


def indices(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# What a rule refuses, as a torch function and its inputs.
BROKEN: dict[str, tuple[str, Callable[..., Tensor], list[Tensor], str]] = {
    "cumsum": ("reduce-window", lambda x: x.cumsum(-1), [floats(2, 600)], "triangle of ones"),
    "sort": ("top-k", lambda x: x.sort(-1).values, [floats(2, 400)], "full sort of 400"),
    "large top-k": ("top-k", lambda x: x.topk(300).values, [floats(2, 400)], "k = 300"),
    "integer top-k": ("top-k", lambda x: x.topk(3).values, [torch.ones(2, 9, dtype=torch.int32)], "a top-k of int32"),
    "random": ("random", lambda x: x + torch.rand(3, 4), [floats(3, 4)], "uniform numbers"),
    "integer dot": ("integer-compute", lambda x: x @ x, [torch.ones(4, 4, dtype=torch.int32)], "product of integers"),
    "integer scatter": (
        "integer-compute",
        lambda x, i: x.index_add(0, i, torch.ones(2, 3, dtype=torch.int32)),
        [torch.ones(4, 3, dtype=torch.int32), indices(0, 1)],
        "integer scatter",
    ),
    "integer power": ("integer-compute", lambda x, y: x**y, [indices(2, 3), indices(1, 2)], "integer power"),
    "gather beyond": (
        "index-range",
        lambda x: x.index_select(0, torch.arange(8, dtype=torch.int32)),
        [floats(5, 3)],
        "index 7 of a gather is beyond dimension 0 of size 5",
    ),
    "NaN": (
        "constant",
        lambda x: torch.where(x > 2, x, torch.full_like(x, torch.nan)),
        [floats(3, 4)],
        "infinite or NaN",
    ),
    "large constant": ("constant", lambda x: x + LARGE, [floats(600, 600)], "1,440,000 bytes"),
    "float8": (
        "type",
        lambda x: x.to(torch.float8_e4m3fn).to(torch.float32),
        [floats(3, 4)],
        "float8_e4m3fn does not run on trn2",
    ),
    "undocumented": ("opcode", lambda x: torch.erf(x), [floats(3, 4)], "not documented"),
}
LARGE = torch.ones(600, 600)


@pytest.mark.parametrize("name", BROKEN)
def test_a_rule_finds_what_breaks_it(name: str) -> None:
    rule, function, inputs, fragment = BROKEN[name]
    broken = [finding for finding in findings(lower_function(function, inputs)) if finding.rule == rule]
    assert broken and fragment in str(broken[0])
    assert broken[0].instruction and broken[0].remedy
    assert broken[0].severity == ("warning" if rule == "opcode" else "error")


@pytest.mark.parametrize(
    ("opcode", "rule"),
    [
        ("while", "control-flow"),
        ("conditional", "control-flow"),
        ("outfeed", "host-transfer"),
        ("rng-bit-generator", "random"),
        ("partition-id", "collective"),
    ],
)
def test_opcodes_that_no_graph_may_have(opcode: str, rule: str) -> None:
    graph = lower_function(lambda x: x * 2 + 1, [floats(3)])
    assert rule in rules(edited(graph, lambda module: setattr(first(module, "add"), "opcode", opcode)))


def test_a_custom_call_must_be_one_that_the_compiler_knows() -> None:
    def call(name: str) -> Callable[[Any], None]:
        def edit(module: Any) -> None:
            first(module, "add").custom_call_target = name
            first(module, "add").opcode = "custom-call"

        return edit

    graph = lower_function(lambda x: x * 2 + 1, [floats(3)])
    assert "custom-call" in rules(edited(graph, call("Sharding")))
    assert "custom-call" not in rules(edited(graph, call("AwsNeuronTopK")))


@pytest.mark.parametrize(
    ("element_type", "target", "refused"),
    [
        ("float64", "trn2", True),
        ("complex64", "trn3", True),
        ("int64", "trn1", True),
        ("uint64", "trn3", True),
        ("float8_e4m3fnuz", "trn3", True),
        ("float8_e4m3fn", "trn1", True),
        ("float8_e4m3fn", "trn3", False),
        ("float8_e4m3", "trn3", True),
        ("float8_e4m3", "trn2", False),
        ("bfloat16", "inf2", False),
    ],
)
def test_types_by_target(element_type: str, target: str, refused: bool) -> None:
    def edit(module: Any) -> None:
        first(module, "add").shape.element_type = hlo.ELEMENT_TYPES[element_type]

    graph = edited(lower_function(lambda x: x * 2 + 1, [floats(3)]), edit)
    assert ("type" in rules(graph, target)) == refused


def test_dynamic_shapes() -> None:
    def edit(module: Any) -> None:
        first(module, "add").shape.is_dynamic_dimension[0] = True

    assert "dynamic-shape" in rules(edited(lower_function(lambda x: x * 2 + 1, [floats(3)]), edit))


def test_weights_that_no_core_holds() -> None:
    def edit(module: Any) -> None:
        first(module, "parameter").shape.dimensions[0] = 5 << 30  # float32: 20 GiB

    graph = edited(lower_function(lambda x: x * 2 + 1, [floats(3)]), edit)
    large = [finding for finding in findings(graph, "inf2") if finding.rule == "memory"]
    assert "20.0 GiB of weights and KV cache for a core of 16 GiB" in str(large[0])
    assert "memory" not in rules(graph, "trn2") and "memory" not in rules(graph, "hlo")


def test_a_slice_whose_start_is_computed() -> None:
    def edit(module: Any) -> None:
        instruction = first(module, "gather")
        instruction.opcode = "dynamic-slice"

    graph = lower_function(lambda x, i: x.index_select(0, i), [floats(5, 3), indices(1)])
    assert "dynamic-slice" in rules(edited(graph, edit))


def test_a_shift_of_other_than_32_bits() -> None:
    def edit(module: Any) -> None:
        first(module, "add").opcode = "shift-right-arithmetic"

    graph = lower_function(lambda x: x + x, [torch.ones(3, dtype=torch.int8)])
    assert "integer-compute" in rules(edited(graph, edit))


def test_a_convolution_dilated_twice() -> None:
    def edit(module: Any) -> None:
        for dimension in first(module, "convolution").window.dimensions:
            dimension.base_dilation = dimension.window_dilation = 2

    graph = lower_function(lambda x, w: nn.functional.conv1d(x, w), [floats(1, 2, 9), floats(2, 2, 3)])
    assert "convolution" not in rules(graph) and "convolution" in rules(edited(graph, edit))


@pytest.fixture(scope="module")
def tiny_graphs(tiny_models: dict[str, nn.Module]) -> list[LoweredGraph]:
    return lower_model(tiny_models["llama"], tiny_config(target="hlo"))


def alias_entry(module: Any) -> Any:
    return module.input_output_alias.entries[0]


@pytest.mark.parametrize(
    ("edit", "fragment"),
    [
        (lambda module: module.input_output_alias.entries.pop(), "is not updated in place"),
        (lambda module: module.input_output_alias.entries.add().CopyFrom(alias_entry(module)), "share the memory"),
        (lambda module: setattr(alias_entry(module), "kind", 1), "MUST_ALIAS"),
        (lambda module: alias_entry(module).output_shape_index.__setitem__(0, 0), "another shape or type"),
    ],
)
def test_every_state_is_updated_in_place_exactly_once(
    tiny_graphs: list[LoweredGraph], edit: Callable[[Any], None], fragment: str
) -> None:
    graph = tiny_graphs[0]
    assert not findings(graph)
    broken = [finding for finding in findings(edited(graph, edit)) if finding.rule == "alias"]
    assert any(fragment in str(finding) for finding in broken)


def test_an_output_that_is_an_input() -> None:
    def edit(module: Any) -> None:
        entry = hlo.entry(module)
        root = next(each for each in entry.instructions if each.id == entry.root_id)
        root.operand_ids[0] = first(module, "parameter").id
        module.input_output_alias.entries.add(output_shape_index=[0], parameter_number=0, kind=hlo.MUST_ALIAS)

    assert "alias" in rules(edited(lower_function(lambda x: x * 2 + 1, [floats(3)]), edit))


def test_parameters_must_be_those_of_the_description(tiny_graphs: list[LoweredGraph]) -> None:
    graph = tiny_graphs[0]
    inputs = graph.io.inputs
    swapped = dataclasses.replace(graph.io, inputs=(inputs[1], inputs[0], *inputs[2:]))
    shorter = dataclasses.replace(graph.io, inputs=inputs[:-1])
    outputs = graph.io.outputs
    wider = dataclasses.replace(graph.io, outputs=(dataclasses.replace(outputs[0], shape=(9,)), *outputs[1:]))
    for io in (swapped, shorter, wider):
        assert "binding" in rules(dataclasses.replace(graph, io=io))


def test_collectives_take_all_ranks_and_floats() -> None:
    graph = lower_function(lambda x: collectives.all_reduce(x, 4), [floats(3)], world_size=4)
    assert not rules(graph)
    fewer = dataclasses.replace(graph, io=dataclasses.replace(graph.io, world_size=2))
    assert "collective" in rules(fewer)
    integers = lower_function(lambda x: collectives.all_reduce(x, 4), [indices(1, 2)], world_size=4)
    assert "integer-compute" in rules(integers)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_graphs_of_our_models_pass(tiny_models: dict[str, nn.Module], name: str) -> None:
    model = copy.deepcopy(tiny_models[name])
    for graph in lower_model(model, tiny_config(target="hlo")):
        for target in HLO_TARGETS:
            assert not findings(graph, target)


def test_the_compilers_own_list_decides_where_there_is_one(tiny_graphs: list[LoweredGraph]) -> None:
    used = {each.opcode for _, each in hlo.instructions(hlo.parse(tiny_graphs[0].hlo))}
    assert not findings(tiny_graphs[0], operators=normalize_operators(used))
    without = findings(tiny_graphs[0], operators=normalize_operators(used - {"logistic"}))
    assert {(finding.rule, finding.severity) for finding in without} == {
        ("opcode", "warning")
    }  # their own graphs have it
    unknown = findings(lower_function(torch.erf, [floats(3)]), operators=normalize_operators(used))
    assert {(finding.rule, finding.severity) for finding in unknown} == {("opcode", "error")}
    assert "does not list logistic" in str(without[0]) and "mlp" in without[0].module
    old_names = normalize_operators(["Mul", "DotGeneral", "ConvertElementType", "AllReduce", "Le"])
    assert {"multiply", "dot", "convert", "allreduce", "compare"} <= old_names


def test_bytes_that_are_no_module_are_refused(tiny_graphs: list[LoweredGraph]) -> None:
    io: GraphIO = tiny_graphs[0].io
    for data in (b"", b"not a module", tiny_graphs[0].hlo[:1000]):
        with pytest.raises(ValueError, match="no HLO module"):
            lint("graph", data, io, "trn2")
